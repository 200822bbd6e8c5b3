"""The release's own test classes, filled with our models. `run.py` runs this file; the default suite never does.

`tests` is here the package that `run.py` has unpacked from the release, not the folder that this file lies in. Where
a test is adapted, `reasons.py` says why.
"""

import os
import unittest
from pathlib import Path
from typing import Any

import torch
from tiny import CONFIGURATIONS, GPT2_MODELS, GPT2_VALUES, MODELS
from transformers import GPT2Config, GPT2Tokenizer

from hf_txl import TransfoXLConfig, TransfoXLTokenizer
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import GenerationTesterMixin, ModelTesterMixin, ids_tensor
from tests.test_pipeline_mixin import PipelineTesterMixin
from tests.test_tokenization_common import TokenizerTesterMixin

TINY_MODELS = Path(os.environ["CONFORMANCE_TINY_MODELS"])


class ModelTester:
    """What the release's mixins ask about a model: a configuration, inputs and their sizes."""

    batch_size = 3
    seq_length = 7
    vocab_size = 99
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    is_training = True
    num_labels = 3

    def __init__(self, config_class: type, values: dict[str, Any]):
        self.config_class, self.values = config_class, values

    def get_config(self) -> Any:
        return self.config_class(**self.values)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


class Common(ModelTesterMixin, GenerationTesterMixin, PipelineTesterMixin):
    """All mixins of models, and the tests that the release writes into each model's own file."""

    values: dict[str, Any]
    config_class: type

    def setUp(self) -> None:
        self.model_tester = ModelTester(self.config_class, self.values)
        self.config_tester = ConfigTester(self, config_class=self.config_class, **self.values)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


def pipelines(base: type, language_model: type, classifier: type) -> dict[str, type]:
    """What the pipeline mixin tests, by task."""
    return {
        "feature-extraction": base,
        "text-generation": language_model,
        "text-classification": classifier,
        "zero-shot": classifier,
    }


class TransfoXL(Common):
    config_class = TransfoXLConfig
    all_model_classes = MODELS
    pipeline_model_mapping = pipelines(*MODELS)
    name: str

    def setUp(self) -> None:
        super().setUp()
        if self._testMethodName.startswith("test_training"):
            self.all_model_classes = MODELS[1:]

    def _prepare_for_class(self, inputs_dict: dict, model_class: type, return_labels: bool = False) -> dict:
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        if return_labels and model_class is not MODELS[0]:
            shape = (len(inputs["input_ids"]),) if model_class is MODELS[2] else inputs["input_ids"].shape
            inputs["labels"] = torch.zeros(shape, dtype=torch.long)
        return inputs

    def run_pipeline_test(self, task: str, repo_name: str, *args: Any, **kwargs: Any) -> None:
        super().run_pipeline_test(task, f"{self.name}-{repo_name}", *args, **kwargs)


class TestPlain(TransfoXL, unittest.TestCase):
    name, values = "plain", CONFIGURATIONS["plain"]


class TestClusters(TransfoXL, unittest.TestCase):
    name, values = "clusters", CONFIGURATIONS["clusters"]


class TestZeros(TransfoXL, unittest.TestCase):
    name, values = "zeros", CONFIGURATIONS["zeros"]


class TestGPT2(Common, unittest.TestCase):
    """The control: the library's own model in the same harness."""

    config_class = GPT2Config
    values = GPT2_VALUES
    all_model_classes = GPT2_MODELS
    pipeline_model_mapping = pipelines(*GPT2_MODELS)


class TestTokenizer(TokenizerTesterMixin, unittest.TestCase):
    tokenizer_class = rust_tokenizer_class = TransfoXLTokenizer
    from_pretrained_id = str(TINY_MODELS / "transfo-xl-tokenizer")


class TestGPT2Tokenizer(TokenizerTesterMixin, unittest.TestCase):
    """The control: the library's own tokenizer."""

    tokenizer_class = rust_tokenizer_class = GPT2Tokenizer
    from_pretrained_id = str(TINY_MODELS / "gpt2-tokenizer")
