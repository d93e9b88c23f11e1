"""Small modules of slime that user files import."""
