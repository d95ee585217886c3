"""Records what the engine does round by round, and reads it again; see docs/traces.md."""
