"""The DFlash drafter: from the target's hidden states to draft logits of a whole block."""
