"""The server of a DiLoCo run: it takes submissions, applies them, and loses none."""
