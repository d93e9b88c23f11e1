"""The models that can be trained, one table for each family.  ``docs/models.md`` explains how to add one."""

from collections.abc import Mapping

from asyncrl.models.families.deepseek import DEEPSEEK_V3
from asyncrl.models.families.family import Family, Rule
from asyncrl.models.families.glm import GLM4, GLM4_MOE, GLM4_MOE_LITE
from asyncrl.models.families.llama import LLAMA
from asyncrl.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE

__all__ = ["FAMILIES", "Family", "Rule"]

FAMILIES: Mapping[str, Family] = {
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "LlamaForCausalLM": LLAMA,
    "Glm4ForCausalLM": GLM4,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
}
"""The families by the name in ``architectures`` of ``config.json``."""
