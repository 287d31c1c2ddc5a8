"""Prompt templates by the name of their convention: what ``template: boxed_cot`` of a domain stands for."""

TEMPLATES = {
    # The question alone: what base models and data whose prompts hold their own instructions want.
    "question": "{prompt}",
    # Qwen2.5-Math's and DeepSeek's instruction, in the user's turn.
    "boxed_cot": "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    # As above without being told to reason.
    "boxed": "{prompt}\nPut your final answer within \\boxed{{}}.",
    # verl's GSM8K: the data set's own mark of a final answer.
    "hash_cot": "{prompt}\nLet's think step by step and output the final answer after \"####\".",
    # Options in a column of their own (MMLU-Pro): a letter a line, and simple-evals' last line.
    "letter_cot": "{prompt}\n\n{options:letters}\n\nThink step by step. The last line of your response should be 'Answer: X', where X is the letter of the right option.",
    "letter": "{prompt}\n\n{options:letters}\n\nAnswer with the letter of the right option alone.",
    # Options inside the question (BIG-Bench Hard).
    "inline_letter_cot": "{prompt}\n\nThink step by step. The last line of your response should be 'Answer: (X)', where X is the letter of the right option.",
    "inline_letter": "{prompt}\n\nAnswer with the letter of the right option alone.",
    "yes_no_cot": "{prompt}\n\nThink step by step. The last line of your response should be 'Answer: Yes' or 'Answer: No'.",
    # Logic-RL's: the verdict on every person inside a tag.
    "knights_tag_cot": "{prompt}\nThink step by step. Then say who is a knight and who is a knave inside answer tags, for every person, e.g. "
                       "<answer>Zoey is a knight, and Oliver is a knave.</answer>",
    # TinyZero's Countdown.
    "countdown_tag_cot": "Using the numbers {numbers:commas}, create an equation that equals {target}. You can use basic arithmetic operations (+, -, *, /) "
                         "and each number exactly once. Think step by step, and return the final equation in answer tags, e.g. <answer>(1 + 2) / 3</answer>.",
}
"""Name -> format string over a row's fields; ``cot`` asks for reasoning before the answer."""
