"""Examples at the end of the help of each command. The tests parse all of them."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("esolm demo", "esolm demo --steps 100 --run runs/short"),
    "sample": (
        "esolm sample stories --show --sampler confidence --window 16 --top_p 0.9",
        'esolm sample stories --sampler left_to_right --prompt "Tom and Lily" --num_samples 3 --json',
    ),
    "infill": (
        'esolm infill stories "Tom was sad. His mom ____ and he ____." --tokens_per_blank 1-8',
        'esolm infill stories "She found ____." --regex "(a|the) [a-z]+" --num_samples 3',
    ),
    "score": (
        "esolm score stories README.md",
        "esolm score runs/mine data/mine --estimator iw --num_orders 16 --json",
    ),
    "serve": ("esolm serve stories", "esolm serve models/mine --host 0.0.0.0 --api_key SECRET"),
    "prepare": (
        "esolm prepare my/texts data/mine --tokenizer bpe:4096 --length 128",
        "esolm prepare chats.jsonl data/chats --chat --tokenizer models/base --length 512",
    ),
    "train": (
        "esolm train laptop-esolm --data data/mine --run runs/mine",
        "torchrun --nproc_per_node 8 -m esolm train owt-esolm --data data/owt --compute.compile",
    ),
    "adapt": (
        "esolm adapt models/mine-ar runs/mine-any --data data/mine",
        "esolm adapt models/mine-ar runs/mine-any --data data/mine --preset adapt-llama-1b --tuning.parts lora",
    ),
    "tune": (
        "esolm tune grpo models/mine runs/tuned --reward molecules",
        "esolm tune dpo models/mine runs/tuned --data pairs.jsonl",
    ),
    "tune grpo": (
        "esolm tune grpo models/mine runs/tuned --reward molecules --steps 50",
        """esolm tune grpo models/mine runs/tuned --reward regex --reward.options '{"pattern": "a+"}'""",
    ),
    "tune dpo": ("esolm tune dpo models/mine runs/tuned --data pairs.jsonl --dpo.beta 0.1",),
    "plan": (
        "esolm plan owt-esolm --gpus 64 --gpu_memory 80GB",
        "esolm plan owt-esolm --gpus 8 --compute.parallel fsdp --json",
    ),
    "info": ("esolm info stories", "esolm info runs/mine --json"),
    "export": ("esolm export runs/mine models/mine", "esolm export runs/mine models/mine --dtype bfloat16 --force"),
    "convert": (
        "esolm convert path/to/llama models/mine-ar",
        "esolm convert owt.ckpt models/owt --tokenizer gpt2:path/to/gpt2",
    ),
    "consolidate": ("esolm consolidate runs/mine",),
    "judge": (
        "esolm judge samples.jsonl path/to/causal-model",
        "esolm judge samples.jsonl gpt2-large --tokenizer runs/mine --eos first --long chunks --no-bos --json",
    ),
    "words": ("esolm words samples.jsonl data/mine",),
    "mauve": ("esolm mauve samples.jsonl data/mine path/to/embedder --json",),
    "overlap": ("esolm overlap summaries.jsonl --reference summary",),
    "molecules": ("esolm molecules samples.jsonl --train train.smi",),
    "variance": ("esolm variance stories README.md --trials 10",),
    "bench": ("esolm bench machine", "esolm bench latency --contexts 512 --rounds 5 --json"),
    "doctor": ("esolm doctor", "esolm doctor --json"),
    "completion": (
        "esolm completion bash > ~/.local/share/bash-completion/completions/esolm",
        "esolm completion zsh > ~/.zfunc/_esolm",
        "esolm completion fish > ~/.config/fish/completions/esolm.fish",
    ),
}
"""By command, or by command and the word after it."""
