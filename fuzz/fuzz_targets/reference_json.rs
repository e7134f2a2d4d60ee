//! Runs the fuzz body `reference_json`.
#![no_main]

#[path = "../../rust/pdkv-core/tests/fuzz_bodies/mod.rs"]
mod fuzz_bodies;

libfuzzer_sys::fuzz_target!(|text: &str| fuzz_bodies::reference_json(text));
