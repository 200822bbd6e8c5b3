"""Run by tests in a process where `hf_txl` cannot be imported: what a stranger does with a folder or a Hub id.

Usage: `python without_package.py FOLDER_OR_ID OUTPUT`. `FOLDER_OR_ID` holds a causal model with clusters and its
tokenizer; it prints one JSON object.
"""

import importlib.abc
import json
import sys


class Absent(importlib.abc.MetaPathFinder):
    """Makes the package look as if it were not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hf_txl", "conversion", "tests"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, Absent())

import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

source, output = sys.argv[1:]
TRUST = {"trust_remote_code": True}
report = {}

config = AutoConfig.from_pretrained(source, **TRUST)
report["config"] = [type(config).__name__, config.model_type, config.mem_len]
tokenizer = AutoTokenizer.from_pretrained(source, **TRUST)
ids = torch.tensor([tokenizer.encode("the cat sat on the mat and the cat")])
report["ids"] = ids.tolist()

body = AutoModel.from_pretrained(source, **TRUST).eval()
model = AutoModelForCausalLM.from_pretrained(source, **TRUST).eval()
classifier = AutoModelForSequenceClassification.from_pretrained(source, num_labels=3, **TRUST)
report["classes"] = [type(each).__name__ for each in (body, model, classifier)]
with torch.no_grad():
    report["states"] = body(ids).last_hidden_state[0, -1].tolist()
    memory = model.init_memory(1)
    report["loss"] = float(model(ids, labels=ids).loss)
    for segment in ids.split(3, dim=1):
        logits = model(segment, cache=memory).logits
    report["logits behind memory"] = logits[0, -1].tolist()

greedy = {"max_new_tokens": 5, "do_sample": False}
report["generated"] = model.generate(ids, **greedy).tolist()
memory = model.init_memory(1)
with torch.no_grad():
    model(ids[:, :4], cache=memory)
report["generated behind memory"] = model.generate(ids[:, 4:], cache=memory, **greedy).tolist()
prompt = "the cat sat"
report["pipeline"] = pipeline("text-generation", model=model, tokenizer=tokenizer)(prompt, **greedy)[0][
    "generated_text"
]
classify = pipeline("text-classification", model=source, **TRUST)
report["labels"] = sorted(each["label"] for each in classify(prompt, top_k=None))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.train()
loss = model(ids, labels=ids, cache=model.init_memory(1)).loss
loss.backward()
optimizer.step()
model.eval()
model.save_pretrained(output)
tokenizer.save_pretrained(output)
again = AutoModelForCausalLM.from_pretrained(output, **TRUST)
with torch.no_grad():
    report["saved again"] = float((again(ids).logits - model(ids).logits).abs().max())
print("report " + json.dumps(report))
