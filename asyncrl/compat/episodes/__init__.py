"""Functions of slime's shape as episodes: programs of the user's process, and the trajectories that they return.

in the user's process       loading   arguments   new_samples   program   scoring   state
in the controller           trajectories ──▶ matching      needs (the static look at a user's file)
"""
