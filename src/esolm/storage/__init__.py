"""Models on disk: checkpoints of runs, in one part or sharded, and folders of exported models, all in safetensors and
JSON. May import the packages before it: `core`, `runtime`, `net`, `sampling`, `systems`, `data` and `likelihood`.
"""
