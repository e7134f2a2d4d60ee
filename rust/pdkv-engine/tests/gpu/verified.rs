//! `verify_copies`: a byte that a GPU's copy leaves wrong ends the transfer, where nobody would see it otherwise.

use std::time::Duration;

use pdkv_core::{Error, ErrorKind};
use pdkv_engine::{Engine, EngineConfig, PullOptions, RawOptions, Transfer, TransferState, TransportKind};

use crate::common::standin::{fail, is_here_with};
use crate::common::{LEASE, Memory, WAIT, cache, fill, memory, table, whole};

const LEN: u64 = 300_000;

/// A driver without batches and without memory in the order of a stream: only kernels copy, and nobody measures which are faster, whose kernels would be the ones
/// that go wrong.
const UNMEASURED: [(&str, &str); 2] = [("PDKV_STANDIN_VERSION", "12040"), ("PDKV_STANDIN_POOLS", "0")];

fn engine(name: &str, kind: TransportKind, verify_copies: bool) -> Engine {
    let config = EngineConfig {
        transports: Some(vec![kind]),
        verify_copies,
        ..EngineConfig::default()
    };
    Engine::new(name, config).unwrap()
}

fn ended(transfer: &Transfer) -> Result<(), Error> {
    let outcome = transfer.wait(WAIT);
    assert!(transfer.wait_quiesced(WAIT));
    let wanted = if outcome.is_ok() {
        TransferState::Done
    } else {
        TransferState::Failed
    };
    assert_eq!(transfer.state(), wanted);
    outcome
}

#[test]
fn a_pull_that_left_a_wrong_byte_fails_where_copies_are_verified_and_nowhere_else() {
    const NAME: &str = "verified::a_pull_that_left_a_wrong_byte_fails_where_copies_are_verified_and_nowhere_else";
    if !is_here_with(NAME, &UNMEASURED) {
        return;
    }
    // By `tcp` into a stage at the owner, and out of one at the reader.
    for (kind, theirs, text) in [
        (TransportKind::Cuda, Memory::Device, "`1` of `2` blocks do not lie "),
        (TransportKind::Cuda, Memory::Private, "`1` of `2` blocks do not lie "),
        (
            TransportKind::Tcp,
            Memory::Device,
            "that went through a stage do not lie ",
        ),
        (
            TransportKind::Tcp,
            Memory::Private,
            "that went through a stage do not lie ",
        ),
    ] {
        for verify in [false, true] {
            let (owner, reader) = (engine("owner", kind, verify), engine("reader", kind, verify));
            let (source, target) = (cache(&owner, theirs), cache(&reader, Memory::Device));
            fill(&source, source.memory(), 1);
            reader
                .connect(owner.address().unwrap(), Duration::from_secs(30))
                .unwrap();
            let export = source.export(table(&[5, 6]), 8, b"", 4, LEASE).unwrap();
            let pull = || {
                let pulled = target.pull(export.reference(), table(&[1, 2]), &PullOptions::default());
                ended(&pulled.unwrap())
            };
            fail(c"wrong", 1, 1);
            let outcome = pull();
            if verify {
                let error = outcome.expect_err(&format!("{kind} from {theirs:?}"));
                assert_eq!(error.kind(), ErrorKind::Integrity, "{kind} from {theirs:?}: {error}");
                assert!(error.message().contains(text), "{kind} from {theirs:?}: {error}");
                // Whoever tries again gets the right ones.
                pull().unwrap();
            } else {
                outcome.expect("nobody looked");
            }
        }
    }
}

#[test]
fn a_push_that_left_a_wrong_byte_fails_where_copies_are_verified_and_nowhere_else() {
    const NAME: &str = "verified::a_push_that_left_a_wrong_byte_fails_where_copies_are_verified_and_nowhere_else";
    if !is_here_with(NAME, &UNMEASURED) {
        return;
    }
    // By `tcp` into a stage at the writer, and out of one at the owner.
    for (kind, ours, theirs) in [
        (TransportKind::Cuda, Memory::Device, Memory::Device),
        (TransportKind::Cuda, Memory::Device, Memory::Private),
        (TransportKind::Tcp, Memory::Device, Memory::Private),
        (TransportKind::Tcp, Memory::Private, Memory::Device),
    ] {
        for verify in [false, true] {
            let (owner, writer) = (engine("owner", kind, verify), engine("writer", kind, verify));
            let (target, source) = (cache(&owner, theirs), cache(&writer, ours));
            fill(&source, source.memory(), 1);
            writer
                .connect(owner.address().unwrap(), Duration::from_secs(30))
                .unwrap();
            let push = || {
                let offer = target.offer(table(&[1, 2]), 8, b"", LEASE).unwrap();
                let pushed = source.push(offer.reference(), table(&[5, 6]), &PullOptions::default());
                ended(&pushed.unwrap())
            };
            fail(c"wrong", 1, 1);
            let outcome = push();
            if verify {
                let error = outcome.expect_err(&format!("{kind} from {ours:?} to {theirs:?}"));
                assert_eq!(
                    error.kind(),
                    ErrorKind::Integrity,
                    "{kind} from {ours:?} to {theirs:?}: {error}"
                );
                push().unwrap();
            } else {
                outcome.expect("nobody looked");
            }
        }
    }
}

#[test]
fn raw_transfers_are_verified_by_the_engine_whose_gpu_copies() {
    if !is_here_with(
        "verified::raw_transfers_are_verified_by_the_engine_whose_gpu_copies",
        &UNMEASURED,
    ) {
        return;
    }
    let owner = engine("owner", TransportKind::Cuda, false);
    for verify in [false, true] {
        let reader = engine("reader", TransportKind::Cuda, verify);
        let peer = reader
            .connect(owner.address().unwrap(), Duration::from_secs(30))
            .unwrap();
        for (theirs, ours) in [
            (Memory::Device, Memory::Device),
            (Memory::Other, Memory::Device),
            (Memory::Device, Memory::Private),
            (Memory::Private, Memory::Device),
        ] {
            let there = owner.register(memory(theirs, LEN), None, true).unwrap();
            let here = reader.register(memory(ours, LEN), None, true).unwrap();
            let bytes: Vec<u8> = (0..LEN).map(|at| (at * 31 + at / 251) as u8 | 1).collect();
            there.memory().write_at(0, &bytes).unwrap();
            let (near, far) = whole(here.id(), there.id(), LEN);
            let wrong = || {
                let mut got = vec![0; LEN as usize];
                here.memory().read_at(0, &mut got).unwrap();
                got.iter().zip(&bytes).filter(|(got, sent)| got != sent).count()
            };
            let read = || ended(&peer.read(&near, &far, None, &RawOptions::default()).unwrap());
            fail(c"wrong", 1, 1);
            let outcome = read();
            assert_eq!(wrong(), 1, "{ours:?} from {theirs:?}");
            if verify {
                let error = outcome.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Integrity, "{ours:?} from {theirs:?}: {error}");
                read().unwrap();
                assert_eq!(wrong(), 0, "{ours:?} from {theirs:?}");
            } else {
                outcome.expect("nobody looked");
            }
        }
    }
}
