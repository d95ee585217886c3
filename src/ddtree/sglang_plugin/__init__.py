"""DDTree in SGLang: our draft trees in the engine's own rounds, through its registries and hooks."""
