//! The fuzz bodies under proptest: random, and random mutations of what is valid.

mod fuzz_bodies;

use fuzz_bodies::{frames, issuer, node, pipe, reference_json};
use pdkv_core::id::{CacheId, ExportId, Incarnation};
use pdkv_core::reference::{ExportKind, Reference};
use proptest::prelude::*;

fn golden() -> Vec<Vec<u8>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
    let files = std::fs::read_dir(folder).expect("golden fixtures");
    let mut paths: Vec<_> = files.map(|entry| entry.expect("readable").path()).collect();
    paths.sort();
    let read = |path: &std::path::PathBuf| {
        let text = std::fs::read_to_string(path).expect("readable");
        pdkv_core::hex::decode(&text.split_whitespace().collect::<String>()).expect("hexadecimal")
    };
    paths.iter().map(read).collect()
}

fn reference() -> Reference {
    Reference {
        version: 1,
        kind: ExportKind::Export,
        engine: "prefill-0".to_owned(),
        address: "127.0.0.1:1".to_owned(),
        incarnation: Incarnation::new([1; 16]),
        export_id: ExportId::new([2; 16]),
        cache: CacheId(3),
        digest: vec![4; 32],
        fingerprint: [5; 32],
        num_tokens: 6,
        num_blocks: 7,
        consumers: 1,
        tag: [8; 16],
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_as_frames(data in prop::collection::vec(any::<u8>(), 0..300)) {
        frames(&data);
    }

    #[test]
    fn mutated_messages_as_frames(
        which in any::<prop::sample::Index>(),
        piece in any::<u8>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let all = golden();
        let mut frame = which.get(&all).clone();
        for (at, byte) in changes {
            let at = at.index(frame.len());
            frame[at] = byte;
        }
        if let Some(cut) = cut {
            frame.truncate(cut.index(frame.len()));
        }
        frame.insert(0, piece);
        frames(&frame);
    }

    #[test]
    fn any_bytes_as_a_pipe(kind in 0_u8..24, mut data in prop::collection::vec(any::<u8>(), 16..300)) {
        pipe(&data);
        // A good header, so that bodies are tried too.
        let body = (data.len() - 16) as u32;
        data[..16].copy_from_slice(&[0x50, 0x4b, 0x44, 0x50, kind, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        data[8..12].copy_from_slice(&body.to_le_bytes());
        pipe(&data);
    }

    #[test]
    fn any_text_as_reference(text in ".{0,200}") {
        reference_json(&text);
    }

    #[test]
    fn mutated_references(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<char>()), 1..3),
    ) {
        let mut text: Vec<char> = reference().to_json().chars().collect();
        for (at, c) in changes {
            let at = at.index(text.len());
            text[at] = c;
        }
        reference_json(&text.into_iter().collect::<String>());
    }

    #[test]
    fn any_bytes_as_an_issuer(mut data in prop::collection::vec(any::<u8>(), 0..300)) {
        issuer(&data);
        // A good beginning, so that the rest is tried too.
        data.splice(0..data.len().min(12), *b"pdkv-issuer\x01");
        issuer(&data);
    }

    #[test]
    fn any_script_for_a_node(data in prop::collection::vec(any::<u8>(), 0..1500)) {
        node(&data);
    }
}

#[test]
fn every_flipped_bit_of_a_reference_is_an_error_or_another_reference() {
    let good = reference().sealed(&[9; 32]);
    let text = good.to_json().into_bytes();
    for bit in 0..text.len() * 8 {
        let mut flipped = text.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        let Ok(flipped) = String::from_utf8(flipped) else {
            continue;
        };
        if let Ok(read) = Reference::from_json(&flipped) {
            assert!(read == good || !read.is_genuine(&[9; 32]), "{flipped}");
        }
    }
}
