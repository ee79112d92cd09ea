"""A borrowed GPU for half an hour: what is prepared before, three calls there, a summary after.

python tools/gpu_kit.py prepare         here: kernels compiled, wheels, the commit -> gpu-kit/
bash tools/gpu_check.sh 1|2|3 FOLDER    there: measurements -> FOLDER/callN.jsonl
python tools/gpu_kit.py summary FOLDER  one screen
"""
