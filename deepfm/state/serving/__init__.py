"""What exports have beside a graph of ids: raw rows, warm-up requests, weights without a graph."""
