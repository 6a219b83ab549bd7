"""Integrations with other tools: Keras, an Orbax-style checkpoint manager, and the Hydra search path."""
