"""Rows in the shapes of public data sets: their columns, with other texts."""

from __future__ import annotations

import json
from typing import Any

Q, A = "Why is the sky of this world so blue?", "Air scatters blue light more than it scatters red light."
C = "Rayleigh scattering grows with the fourth power of the frequency."
T = "The user asks about the sky. I should name scattering and keep it short."
WORSE = "The sky is blue because it mirrors the sea, as everyone knows."
SYSTEM = "You are a helpful assistant. Answer in one sentence."
ASKED, ANSWERED = {"role": "user", "content": Q}, {"role": "assistant", "content": A}
CHAT = [ASKED, ANSWERED]
WORSE_CHAT = [ASKED, {"role": "assistant", "content": WORSE}]
SHAREGPT = [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]
TOOL = {"name": "sky", "description": "Tells the color.", "parameters": {"type": "object", "properties": {}}}
HUMAN = f"\n\nHuman: {Q}\n\nAssistant:"

ROWS: dict[str, dict[str, Any]] = {
    # instructions
    "databricks-dolly-15k": {"instruction": Q, "context": C, "response": A, "category": "closed_qa"},
    "alpaca": {
        "instruction": Q,
        "input": C,
        "output": A,
        "text": f"Below is an instruction.\n\n### Instruction:\n{Q}\n\n### Input:\n{C}\n\n### Response:\n{A}",
    },
    "CodeAlpaca-20k": {"instruction": Q, "input": "", "output": A},
    "OpenOrca": {"id": "niv.242684", "system_prompt": SYSTEM, "question": Q, "response": A},
    "MetaMathQA": {"type": "MATH_AnsAug", "query": Q, "original_question": C, "response": A},
    "gsm8k": {"question": Q, "answer": A},
    "Magicoder-OSS-Instruct-75K": {
        "lang": "python",
        "raw_index": 3,
        "index": 5,
        "seed": C,
        "openai_fingerprint": "fp_eeff13170a",
        "problem": Q,
        "solution": A,
    },
    "LIMO": {"question": Q, "solution": A, "answer": "blue light"},
    "squad as text": {"id": "56be", "title": "Sky", "context": C, "question": Q, "answer": "light"},
    "Open-Platypus": {"input": "", "output": A, "instruction": Q, "data_source": "MATH/PRM-800K"},
    "LLaMA-Factory alpaca": {
        "instruction": Q,
        "input": "",
        "output": A,
        "system": SYSTEM,
        "history": [["Hello.", "Good day."]],
    },
    "Magpie-Pro": {
        "uuid": "a-1",
        "instruction": Q,
        "response": A,
        "conversations": SHAREGPT,
        "task_category": "Math",
    },
    # reasoning
    "question, reasoning, answer": {"question": Q, "reasoning": T, "answer": A},
    "medical-o1-reasoning-SFT": {"Question": Q, "Complex_CoT": T, "Response": A},
    "s1K": {
        "solution": "short",
        "question": Q,
        "cot_type": "math",
        "source_type": "qq8933/AIME",
        "metadata": "{'ID': '1'}",
        "cot": None,
        "thinking_trajectories": [T],
        "attempt": A,
    },
    "OpenThoughts metadata": {
        "problem": Q,
        "deepseek_reasoning": T,
        "deepseek_solution": A,
        "ground_truth_solution": C,
        "domain": "math",
        "source": "numina_math",
        "solution": A,
    },
    "CoT-Collection": {"source": Q, "target": A, "rationale": T, "task": "cos_e", "type": "CoT"},
    "OpenMathReasoning": {
        "expected_answer": "42",
        "problem_type": "has_answer_extracted",
        "problem_source": "aops_c4",
        "generation_model": "DeepSeek-R1",
        "pass_rate_72b_tir": "0.65",
        "problem": Q,
        "generated_solution": f"<think>\n{T}\n</think>\n{A}",
        "inference_mode": "cot",
    },
    "prompt, completion and reasoning": {"prompt": Q, "completion": A, "reasoning": T},
    "Nemotron switch": {"question": Q, "answer": A, "reasoning": "on", "license": "CC BY 4.0"},
    # conversations
    "OpenHermes-2.5": {
        "id": None,
        "conversations": SHAREGPT,
        "source": "airoboros2.2",
        "category": "orca",
        "system_prompt": SYSTEM,
        "custom_instruction": None,
    },
    "SlimOrca": {"conversations": [{"from": "system", "value": SYSTEM, "weight": None}, *SHAREGPT]},
    "ultrachat_200k": {
        "prompt": Q,
        "prompt_id": "f0e37e9f7800261167ce91143f98f511f768847236",
        "messages": CHAT,
    },
    "no_robots": {"prompt": Q, "prompt_id": "b1d0", "messages": CHAT, "category": "Open QA"},
    "tulu-3-sft-mixture": {"id": "oasst1_1", "messages": CHAT, "source": "ai2-adapt-dev/oasst1"},
    "OpenR1-Math-220k": {
        "problem": Q,
        "solution": C,
        "answer": "4",
        "problem_type": "Algebra",
        "uuid": "586f",
        "generations": [A],
        "is_reasoning_complete": [True],
        "messages": CHAT,
    },
    "smoltalk2": {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}, "source": "a"},
    "hermes-function-calling-v1": {
        "id": "a-1",
        "conversations": SHAREGPT,
        "tools": json.dumps([{"type": "function", "function": TOOL}]),
        "category": "Information Extraction",
        "task": "Extract",
    },
    "messages with reasoning": {"messages": CHAT, "reasoning": T, "model": "R1"},
    "messages with images": {"messages": CHAT, "images": ["sky.png"]},
    # preferences
    "ultrafeedback_binarized": {
        "prompt": Q,
        "prompt_id": "77da",
        "chosen": CHAT,
        "rejected": WORSE_CHAT,
        "messages": CHAT,
        "score_chosen": 7.5,
        "score_rejected": 2.0,
    },
    "hh-rlhf": {"chosen": f"{HUMAN} {A}", "rejected": f"{HUMAN} {WORSE}"},
    "orca_dpo_pairs": {"system": SYSTEM, "question": Q, "chosen": A, "rejected": WORSE},
    "py-dpo": {"prompt": Q, "chosen": A, "rejected": WORSE, "id": "3f"},
    "distilabel-intel-orca-dpo-pairs": {
        "system": "",
        "input": Q,
        "chosen": A,
        "rejected": WORSE,
        "generations": [A, WORSE],
        "order": ["chosen", "rejected"],
        "rating": [9.0, 1.0],
        "rationale": T,
        "status": "unchanged",
        "in_gsm8k_train": False,
    },
    "orpo-dpo-mix-40k": {
        "source": "Airoboros",
        "chosen": CHAT,
        "rejected": WORSE_CHAT,
        "prompt": Q,
        "question": Q,
    },
    "Math-Step-DPO-10K": {
        "dataset": "gsm8k",
        "prompt": Q,
        "initial_reason_steps": C,
        "chosen": A,
        "rejected": WORSE,
        "full_chosen": f"{C} {A}",
        "answer": "4",
    },
    "kto-mix-14k": {
        "prompt": [ASKED],
        "completion": [ANSWERED],
        "label": True,
        "dataset": "argilla/capybara",
    },
    # texts
    "xsum": {"document": C, "summary": A, "id": "29750031"},
    "cnn_dailymail": {"article": C, "highlights": A, "id": "f001"},
    "samsum": {"id": "13818513", "dialogue": "Ann: I baked bread. Want some?\r\nBob: Sure!", "summary": A},
    "fineweb": {
        "text": C,
        "id": "<urn:uuid:39147604>",
        "dump": "CC-MAIN-2013-20",
        "url": "https://a.b/c",
        "date": "2013-05-18T05:48:54Z",
        "language": "en",
        "language_score": 0.98,
        "token_count": 69,
    },
    "wikipedia": {"id": "1", "url": "https://en.wikipedia.org/wiki/Sky", "title": "Sky", "text": C},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "squad": (
        {
            "id": "56be",
            "title": "Sky",
            "context": C,
            "question": Q,
            "answers": {"text": ["a"], "answer_start": [1]},
        },
        "has the columns id, title, context, question and answers",
    ),
    "opus100": ({"translation": {"en": "Hello", "de": "Hallo"}}, "has the columns translation"),
    "Capybara": (
        {"source": "a", "conversation": [{"input": Q, "output": A}]},
        "as chat: message 0 has the role None",
    ),
    "glaive-function-calling-v2": (
        {"system": "SYSTEM: You may call functions.", "chat": "USER: Hi\n\n\nASSISTANT: Hello <|endoftext|>"},
        "as chat: 'chat' is a string, not a list",
    ),
    "xlam-function-calling-60k": (
        {"id": 0, "query": Q, "answers": '[{"name": "sky", "arguments": {}}]', "tools": json.dumps([TOOL])},
        "has the columns id, query, answers and tools",
    ),
    "dolphin-r1": (
        {"messages": [ASKED], "reasoning": T, "answer": A, "model": "R1"},
        "as chat: no assistant turn",
    ),
    "Nemotron-Post-Training": (
        {"input": [ASKED], "output": A, "reasoning": "on", "system_prompt": "detailed thinking on"},
        "'input' is a list and 'output' a string",
    ),
    "answers alone": ({"chosen": A, "rejected": WORSE, "source": "web"}, "no 'prompt'"),
}
