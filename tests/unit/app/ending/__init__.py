"""How a program ends when its orderly end does not come."""
