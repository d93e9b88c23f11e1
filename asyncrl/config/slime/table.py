"""The table of all flags that are not simply settings of a run, by flag name."""

from collections.abc import Mapping

from asyncrl.config.slime.generation import GENERATION
from asyncrl.config.slime.model import MODEL
from asyncrl.config.slime.operation import OPERATION
from asyncrl.config.slime.status import FlagStatus, Rows
from asyncrl.config.slime.training import TRAINING

SECTIONS: Mapping[str, Rows] = {
    "Model": MODEL,
    "Training": TRAINING,
    "Data and generation": GENERATION,
    "Operation": OPERATION,
}
"""The rows by the heading under which docs/slime.md lists them."""

TABLE: Mapping[str, FlagStatus] = {row.name: row for rows in SECTIONS.values() for row in rows}
