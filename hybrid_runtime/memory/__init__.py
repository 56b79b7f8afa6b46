"""Device pools, their slot allocators, the request table and the plan that sizes them."""
