"""Torch layers that the target and the drafter share."""
