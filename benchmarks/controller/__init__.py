"""CPU time and lag of the controller's event loop."""
