"""`dcp-fix compare`: two serving endpoints (vLLM, SGLang), byte for byte, each asked twice.

Begin with compare.py; prompts.py: what is asked, endpoint.py: one server, answers.py: what it said, in a file too.
Not here: starting a server, and any opinion on speed.
"""
