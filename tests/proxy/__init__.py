"""`pdkv proxy` over engines that are mocks: both legs, failures, cancellation, processes that are killed."""
