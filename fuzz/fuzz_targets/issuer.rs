//! Runs the fuzz body `issuer`.
#![no_main]

#[path = "../../rust/pdkv-core/tests/fuzz_bodies/mod.rs"]
mod fuzz_bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_bodies::issuer(data));
