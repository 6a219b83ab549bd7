"""Other loops and managers: Keras, an Orbax-style manager, the Hydra search path."""
