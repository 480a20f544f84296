"""Contract of saved objects: keys, scopes, versions, and the schema of their state."""
