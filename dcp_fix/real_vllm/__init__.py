"""The repair ladder in the installed vLLM, on GPUs: one boot of its offline `LLM` for each rung.

Begin with real_ladder.py; rungs.py says what each rung boots, boot.py boots it, rows.py judges the answers.
Not here: how defects get in and out of vLLM (plugin/), and the ladder on our own engine (ladder/).
"""
