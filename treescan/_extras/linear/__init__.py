"""Linear recurrences, `h[t] = a[t] * h[t-1] + b[t]`."""
