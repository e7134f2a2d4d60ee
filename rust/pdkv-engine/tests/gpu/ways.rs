//! Which transport moves between which memory, and what is said of the others.

use std::time::Duration;

use pdkv_core::ErrorKind;
use pdkv_engine::{LocalSpan, PullOptions, RawOptions, RemoteSpan, TransportKind};

use crate::common::standin::is_here;
use crate::common::{Memory, WAIT, engine, memory};

#[test]
fn memory_of_a_gpu_goes_by_the_gpu_and_memory_of_the_host_does_not() {
    if !is_here("ways::memory_of_a_gpu_goes_by_the_gpu_and_memory_of_the_host_does_not") {
        return;
    }
    let owner = engine("owner", TransportKind::ALL);
    let reader = engine("reader", TransportKind::ALL);
    let peer = reader
        .connect(owner.address().unwrap(), Duration::from_secs(30))
        .unwrap();
    let link = || {
        let links = peer.links();
        links
            .into_iter()
            .find(|link| link.transport == TransportKind::Cuda)
            .unwrap()
    };
    assert!(!link().usable, "{:?}", link());
    assert_eq!(link().detail, "neither side is device memory");
    let kinds = [Memory::Private, Memory::Device];
    for (ours, theirs) in kinds.iter().flat_map(|ours| kinds.map(|theirs| (*ours, theirs))) {
        let here = reader.register(memory(ours, 1 << 20), None, true).unwrap();
        let there = owner.register(memory(theirs, 1 << 20), None, true).unwrap();
        there.memory().fill(0, 1 << 20, 7).unwrap();
        let near = LocalSpan {
            region: here.id(),
            offset: 0,
            len: 1 << 20,
        };
        let far = RemoteSpan {
            region: there.id(),
            offset: 0,
            len: 1 << 20,
        };
        let read = |require: Option<TransportKind>| {
            let options = RawOptions {
                require: require.map(Into::into),
                ..RawOptions::default()
            };
            peer.read(&[near], &[far], None, &options)
        };
        let any = ours == Memory::Device || theirs == Memory::Device;
        let refused = if any {
            TransportKind::Inproc
        } else {
            TransportKind::Cuda
        };
        let error = read(Some(refused)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("device memory"), "{error}");
        let transfer = read(None).unwrap();
        transfer.wait(WAIT).unwrap();
        let expected = if any {
            TransportKind::Cuda
        } else {
            TransportKind::Inproc
        };
        assert_eq!(transfer.path().transport, expected, "{ours:?} from {theirs:?}");
        assert_eq!(transfer.stats().staged_bytes, 0);
        let mut got = vec![0; 1 << 20];
        here.memory().read_at(0, &mut got).unwrap();
        assert!(got.iter().all(|&byte| byte == 7), "{ours:?} from {theirs:?}");
    }
    assert!(link().usable, "{:?}", link());
}

#[test]
fn what_only_moves_host_memory_says_so_and_the_owner_too() {
    if !is_here("ways::what_only_moves_host_memory_says_so_and_the_owner_too") {
        return;
    }
    // The owner's side of tcp is asked by an initiator that takes its region for host memory.
    let (owner, reader) = (
        engine("owner", &[TransportKind::Tcp]),
        engine("reader", &[TransportKind::Tcp]),
    );
    let source = crate::common::cache(&owner, Memory::Device);
    let target = crate::common::cache(&reader, Memory::Private);
    let peer = reader
        .connect(owner.address().unwrap(), Duration::from_secs(30))
        .unwrap();
    let export = source
        .export(crate::common::table(&[1]), 4, b"", 1, crate::common::LEASE)
        .unwrap();
    let refused = target.pull(export.reference(), crate::common::table(&[1]), &PullOptions::default());
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("is device memory"), "{error}");
    assert!(peer.alive());
}
