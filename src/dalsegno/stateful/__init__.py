"""The contract of whatever is saved: its keys, scopes and versions, and the schema of its state."""
