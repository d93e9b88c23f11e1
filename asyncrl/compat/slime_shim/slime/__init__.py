"""The part of slime's interface that user files import."""
