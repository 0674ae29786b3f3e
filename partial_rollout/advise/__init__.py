"""What each mode would gain, predicted before a job is run.

`measure` takes an engine's latency curve: what a decode step, prefill and an interruption cost. `scheduler` runs the
service's admission, claims, interruptions and batches in virtual time on such a curve; `predict` does it for all modes
and a distribution of response lengths, `jobs` for jobs that were measured, to show how far to believe a prediction.
`measured` says what such jobs took.
"""
