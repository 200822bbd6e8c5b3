"""The process that reads TensorFlow checkpoints for `read_tensorflow.py`; run as a script, never imported.

It answers each line of JSON with another. `{"open": prefix}` gives `{"variables": {name: [dtype, shape]}}`, and
`{"read": name}` gives `{"size": bytes}` and that many bytes: a variable of the checkpoint opened last. `{"error":
reason}` reports failures. A separate process, since TensorFlow aborts on some malformed files, and to free its memory.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    # other output must not reach the caller
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def answer(message: dict[str, Any], data: Any = b"") -> None:
        answers.write(json.dumps(message).encode() + b"\n")
        answers.write(data)
        answers.flush()

    import numpy as np
    from tensorflow.compat.v1.train import NewCheckpointReader

    answer({"ready": True})
    reader: Any = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            if "open" in request:
                # TensorFlow takes the path for a pattern in which brackets are special; the name has none
                folder, name = os.path.split(request["open"])
                os.chdir(folder)
                reader = NewCheckpointReader(f"./{name}")
                shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
                answer({"variables": {name: [dtypes[name].name, shapes[name]] for name in shapes}})
            else:
                values = np.ascontiguousarray(reader.get_tensor(request["read"]))
                answer({"size": values.nbytes}, values.view(np.uint8).data)
        # TensorFlow reports damage as errors of many kinds, IndexError and UnicodeDecodeError among them
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
