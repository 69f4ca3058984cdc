"""What tests and benches share: real servers, tiny models, recorded traffic."""
