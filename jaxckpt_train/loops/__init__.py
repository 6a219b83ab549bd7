"""The forms of other libraries' loops: Orbax's manager, and a callback of Keras."""
