"""A borrowed GPU for half an hour: what is prepared before, three calls there, a summary after.

make gpu-kit                          here: kernels compiled, wheels, the commit -> gpu-kit/
bash tools/gpu_check.sh 1|2|3 FOLDER  there: measurements -> FOLDER/callN.jsonl
PYTHONPATH=.:tools python -m gpu_kit summary FOLDER
"""
