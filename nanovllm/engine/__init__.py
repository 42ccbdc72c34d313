"""The engine: requests, scheduling and paged K/V on the CPU, one ModelRunner per device."""
