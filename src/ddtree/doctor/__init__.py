"""Whether DDTREE will work on this machine, and what to do where it will not; SGLang is never imported."""
