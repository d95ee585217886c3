"""Trains or adapts a DFlash drafter: corpus, features, training, evaluation, export."""
