"""Running a loaded model: prefill, decode, scoring, tracing, sampling, generation, and keeping caches."""
