"""The repair ladder, `dcp-fix reproduce`: the same prompts at DCP1 and, with one defect fewer on every rung, at DCP4.

Begin with ladder.py; report.py is what it prints; reference.py refuses a DCP1 that says nothing. README.md says what is
shown, and what is rigged.
Not here: the defects themselves (broken.py), and the ladder in the installed vLLM (real_vllm/).
"""
