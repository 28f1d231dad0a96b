"""`dcp-fix verify`: does every DCP size give the same answer? If not, the first step that differs is named.

Begin with verify.py. Two passes: free.py compares answers, forced.py every sublayer on DCP1's input (sublayers.py sees
what each made of it, steps.py says how far each may differ). all_planted.py runs every planted defect; multi_gpu.py
proves all that a host can. Not here: exact mode itself (exact/).
"""
