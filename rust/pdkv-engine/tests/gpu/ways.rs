//! Which transport moves between which memory, and what is said of the others.

use std::time::Duration;

use pdkv_core::ErrorKind;
use pdkv_engine::{Engine, EngineConfig, GpuMemory, LocalSpan, RawOptions, RemoteSpan, TransportKind};

use crate::common::standin::{count, is_here};
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
    assert_eq!(link().gpu, GpuMemory::Refused, "as long as there is none");
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
        // However little it is: a stage would cost more than the launch.
        let little = peer.read(
            &[LocalSpan { len: 1, ..near }],
            &[RemoteSpan { len: 1, ..far }],
            None,
            &RawOptions::default(),
        );
        let little = little.unwrap();
        little.wait(WAIT).unwrap();
        assert_eq!(little.path().transport, expected, "{ours:?} from {theirs:?}");
        let mut got = vec![0; 1 << 20];
        here.memory().read_at(0, &mut got).unwrap();
        assert!(got.iter().all(|&byte| byte == 7), "{ours:?} from {theirs:?}");
    }
    assert!(link().usable && link().gpu == GpuMemory::Direct, "{:?}", link());
}

#[test]
fn memory_of_a_gpu_goes_by_tcp_through_a_stage_and_never_unasked() {
    if !is_here("ways::memory_of_a_gpu_goes_by_tcp_through_a_stage_and_never_unasked") {
        return;
    }
    let by_tcp = |name: &str, staging_bytes: u64| {
        let config = EngineConfig {
            transports: Some(vec![TransportKind::Tcp]),
            staging_bytes,
            ..EngineConfig::default()
        };
        Engine::new(name, config).unwrap()
    };
    let owner = by_tcp("owner", 128 << 10);
    let (reader, strict) = (by_tcp("reader", 128 << 10), by_tcp("strict", 0));
    let connect = |engine: &Engine| {
        let address = owner.address().unwrap();
        engine.connect(address, Duration::from_secs(30)).unwrap()
    };
    let (peer, refusing) = (connect(&reader), connect(&strict));
    let said = [&peer, &refusing].map(|peer| peer.links()[0].gpu);
    assert_eq!(said, [GpuMemory::Staged, GpuMemory::Refused]);
    let len = 300_000;
    let kinds = [Memory::Private, Memory::Device];
    for (ours, theirs) in kinds.iter().flat_map(|ours| kinds.map(|theirs| (*ours, theirs))) {
        let here = reader.register(memory(ours, len), None, true).unwrap();
        let there = owner.register(memory(theirs, len), None, true).unwrap();
        let bytes: Vec<u8> = (0..len).map(|at| (at * 31 + at / 251) as u8).collect();
        there.memory().write_at(0, &bytes).unwrap();
        // Uneven spans, many times more than a stage holds, in descending order.
        let cuts = [0, 1, 70_000, 200_001, len];
        let pairs: Vec<_> = cuts.windows(2).rev().map(|cut| (cut[0], cut[1] - cut[0])).collect();
        let near: Vec<_> = pairs
            .iter()
            .map(|&(offset, len)| LocalSpan {
                region: here.id(),
                offset,
                len,
            })
            .collect();
        let far: Vec<_> = pairs
            .iter()
            .map(|&(offset, len)| RemoteSpan {
                region: there.id(),
                offset,
                len,
            })
            .collect();
        let any = ours == Memory::Device || theirs == Memory::Device;
        let transfer = peer.read(&near, &far, None, &RawOptions::default()).unwrap();
        transfer.wait(WAIT).unwrap();
        let mut got = vec![0; len as usize];
        here.memory().read_at(0, &mut got).unwrap();
        assert!(got == bytes, "{ours:?} from {theirs:?}");
        assert_eq!(transfer.stats().staged_bytes, if any { len } else { 0 });
        // And back, over something else.
        there.memory().fill(0, len, 0).unwrap();
        let transfer = peer.write(&far, &near, None, &RawOptions::default()).unwrap();
        transfer.wait(WAIT).unwrap();
        there.memory().read_at(0, &mut got).unwrap();
        assert!(got == bytes, "{ours:?} to {theirs:?}");
        if any {
            let here = strict.register(memory(ours, len), None, true).unwrap();
            let near = LocalSpan {
                region: here.id(),
                ..near[0]
            };
            let error = refusing
                .read(&[near], &far[..1], None, &RawOptions::default())
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains("`staging_bytes` is 0"), "{error}");
        }
    }
    // What `cuda` pins for each GPU of a process is apart, and said in the guide: 4 MiB for its posts and 3 for what it measures, with a page of each queue.
    let own = (7 << 20) + 5 * 4096;
    let pinned = count("most pinned bytes");
    assert!(0 < pinned && pinned <= 2 * (128 << 10) + own, "{pinned}");
}

#[test]
fn two_engines_that_read_from_each_other_through_few_stages_never_wait_for_each_others() {
    if !is_here("ways::two_engines_that_read_from_each_other_through_few_stages_never_wait_for_each_others") {
        return;
    }
    // One stage to send from and one to receive into, two streams each way.
    let config = || EngineConfig {
        transports: Some(vec![TransportKind::Tcp]),
        staging_bytes: 128 << 10,
        tcp_streams: 2,
        ..EngineConfig::default()
    };
    let (left, right) = (
        Engine::new("left", config()).unwrap(),
        Engine::new("right", config()).unwrap(),
    );
    let len: u64 = 8 << 20;
    let read_from = |here: &Engine, there: &Engine, fill: u8| {
        let near = here.register(memory(Memory::Device, len), None, true).unwrap();
        let far = there.register(memory(Memory::Device, len), None, true).unwrap();
        far.memory().write_at(0, &vec![fill; len as usize]).unwrap();
        let peer = here.connect(there.address().unwrap(), Duration::from_secs(30)).unwrap();
        // Several transfers at once, so that each stream has work.
        let part = len / 4;
        for _ in 0..3 {
            let running: Vec<_> = (0..4)
                .map(|index| {
                    let offset = index * part;
                    let (dst, src) = (
                        LocalSpan {
                            region: near.id(),
                            offset,
                            len: part,
                        },
                        RemoteSpan {
                            region: far.id(),
                            offset,
                            len: part,
                        },
                    );
                    peer.read(&[dst], &[src], None, &RawOptions::default()).unwrap()
                })
                .collect();
            for transfer in running {
                transfer.wait(WAIT).unwrap();
            }
        }
        let mut got = vec![0; len as usize];
        near.memory().read_at(0, &mut got).unwrap();
        assert!(got.iter().all(|&byte| byte == fill));
    };
    std::thread::scope(|scope| {
        scope.spawn(|| read_from(&left, &right, 3));
        scope.spawn(|| read_from(&right, &left, 5));
    });
}
