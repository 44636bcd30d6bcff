cd /tmp/weight-cov
export PYTHONPATH=.:tests/lib:hooks PYTHONDONTWRITEBYTECODE=1
rm -f c1.jsonl c8.jsonl
WCOV_OUT=c1.jsonl nice -n 10 .venv/bin/python -m pytest -p wcov -p no:cacheprovider -q -m "not slow and not devices" > c1.log 2>&1
WCOV_OUT=c8.jsonl JAX_NUM_CPU_DEVICES=8 nice -n 10 .venv/bin/python -m pytest -p wcov -p no:cacheprovider -q -m "not slow and devices" > c8.log 2>&1
