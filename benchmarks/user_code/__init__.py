"""The cost for the controller of user code that misbehaves, and of calls to user code that behaves."""
