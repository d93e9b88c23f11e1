"""The parts of slime's Ray modules that user files import."""
