"""Functions of slime's shape as episodes: what the other packages use of ``compat/episodes``.

``slime_program`` runs in the process of user code, ``outcome_of`` in the controller.
"""

from asyncrl.compat.episodes.function_paths import function_path
from asyncrl.compat.episodes.needs import Need, needs_of
from asyncrl.compat.episodes.program import SlimeProgram, slime_program
from asyncrl.compat.episodes.shapes import Shape, is_slime_generate, is_slime_reward, shape_of
from asyncrl.compat.episodes.shim import install_shim
from asyncrl.compat.episodes.trajectories import outcome_of, trajectories_of

__all__ = [
    "Need",
    "Shape",
    "SlimeProgram",
    "function_path",
    "install_shim",
    "is_slime_generate",
    "is_slime_reward",
    "needs_of",
    "outcome_of",
    "shape_of",
    "slime_program",
    "trajectories_of",
]
