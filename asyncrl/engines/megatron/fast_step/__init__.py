"""The check at the start of a run that each fast operation of a training step equals its plain form."""
