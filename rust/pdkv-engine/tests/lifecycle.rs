//! How transfers, exports and peers end: cancelled, released, restarted, crowded.

mod common;

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{BLOCKS, LAYERS, LEASE, Memory, Pair, WAIT, allocate, cache, engine, table};
use pdkv_core::ErrorKind;
use pdkv_device::{HostRegion, HugePages};
use pdkv_engine::{Engine, EngineConfig, LocalSpan, PullOptions, RawOptions, RemoteSpan, TransferState, TransportKind};

fn all_blocks() -> Vec<u32> {
    (0..BLOCKS).collect()
}

#[test]
fn a_cancelled_pull_never_writes_after_it_is_quiesced() {
    for way in common::every_way() {
        let pair = Pair::new(way);
        for _ in 0..12 {
            let export = pair.source.export(table(&all_blocks()), 256, b"", 1, LEASE).unwrap();
            let transfer = pair
                .target
                .pull(export.reference(), table(&all_blocks()), &PullOptions::default())
                .unwrap();
            transfer.cancel();
            transfer.cancel();
            assert!(transfer.wait_quiesced(WAIT));
            common::fill(&pair.target, pair.target.memory(), 2);
            match transfer.wait(WAIT) {
                Ok(()) => assert_eq!(transfer.state(), TransferState::Done, "it was faster than the cancel"),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::TransferCancelled);
                    assert_eq!(transfer.state(), TransferState::Cancelled);
                }
            }
            std::thread::sleep(Duration::from_millis(2));
            pair.check(&[], 0..LAYERS);
            export.release().unwrap();
        }
        // The link is as good as before.
        let export = pair.source.export(table(&[4]), 4, b"", 1, LEASE).unwrap();
        pair.target
            .pull(export.reference(), table(&[9]), &PullOptions::default())
            .unwrap()
            .wait(WAIT)
            .unwrap();
        pair.check(&[(9, 4)], 0..LAYERS);
    }
}

#[test]
fn an_export_released_under_a_pull_is_never_reported_done_afterwards() {
    for way in common::every_way() {
        let pair = Pair::new(way);
        for round in 0..12 {
            let export = pair.source.export(table(&all_blocks()), 256, b"", 1, LEASE).unwrap();
            let transfer = pair
                .target
                .pull(export.reference(), table(&all_blocks()), &PullOptions::default())
                .unwrap();
            if round % 2 == 0 {
                std::thread::yield_now();
            }
            export.release().unwrap();
            let released_first = export.state().as_str() == "released";
            match transfer.wait(WAIT) {
                Ok(()) => assert!(!released_first, "done although the owner had released the blocks"),
                Err(error) => assert!(
                    matches!(
                        error.kind(),
                        ErrorKind::ReferenceReleased | ErrorKind::PeerLost | ErrorKind::TransferCancelled
                    ),
                    "{error:?}"
                ),
            }
            assert!(transfer.wait_quiesced(WAIT));
        }
    }
}

#[test]
fn a_released_offer_is_quiesced_only_when_nobody_writes_any_more() {
    for way in common::every_way() {
        let pair = Pair::new(way);
        for _ in 0..12 {
            let offer = pair.source.offer(table(&all_blocks()), 256, b"", LEASE).unwrap();
            let transfer = pair
                .target
                .push(offer.reference(), table(&all_blocks()), &PullOptions::default())
                .unwrap();
            offer.release().unwrap();
            assert!(offer.wait_quiesced(WAIT));
            common::fill(&pair.source, pair.source.memory(), 5);
            let _ = transfer.wait(WAIT);
            assert!(transfer.wait_quiesced(WAIT));
            for block in 0..BLOCKS {
                let bytes = common::read(&pair.source, pair.source.memory(), 1, block);
                assert_eq!(
                    bytes,
                    common::expected(5, 1, block),
                    "{way:?}: block {block} was written late"
                );
            }
        }
    }
}

#[test]
fn an_offer_outlives_the_connection_as_long_as_its_writer_copies() {
    // On the other ways the owner's own threads place the bytes, and stop when told.
    for way in common::every_way()
        .into_iter()
        .filter(|way| way.kind != TransportKind::Tcp && way.is_direct())
    {
        let (owner, writer) = (way.engine("owner"), way.engine("writer"));
        let target = common::cache_of(&owner, common::memory_for(way.kind), 16 << 10);
        let source = common::cache_of(&writer, common::memory_for(way.kind), 16 << 10);
        for _ in 0..6 {
            let peer = writer
                .connect(owner.address().unwrap(), Duration::from_secs(30))
                .unwrap();
            let offer = target.offer(table(&all_blocks()), 256, b"", LEASE).unwrap();
            let transfer = source
                .push(offer.reference(), table(&all_blocks()), &PullOptions::default())
                .unwrap();
            while transfer.state() == TransferState::Claiming {
                std::thread::yield_now();
            }
            peer.close();
            offer.release().unwrap();
            assert!(offer.wait_quiesced(WAIT), "{way:?}: its writer is never out");
            assert!(
                transfer.quiesced(),
                "{way:?}: blocks were reusable while they were written"
            );
        }
    }
}

#[test]
fn a_region_registered_this_moment_is_found_by_peers() {
    let pair = Pair::new(TransportKind::Cma);
    let here = pair
        .consumer
        .register(allocate(Memory::Private, 64), None, true)
        .unwrap();
    let dst = LocalSpan {
        region: here.id(),
        offset: 0,
        len: 64,
    };
    for _ in 0..200 {
        let there = pair
            .producer
            .register(allocate(Memory::Private, 64), None, true)
            .unwrap();
        let src = RemoteSpan {
            region: there.id(),
            offset: 0,
            len: 64,
        };
        let transfer = pair.peer.read(&[dst], &[src], None, &RawOptions::default()).unwrap();
        transfer.wait(WAIT).unwrap();
    }
}

fn listening(name: &str, address: &str) -> Engine {
    let config = EngineConfig {
        listen: Some(address.to_owned()),
        ..EngineConfig::default()
    };
    Engine::new(name, config).unwrap()
}

#[test]
fn a_restart_on_the_same_port_is_another_engine() {
    let consumer = engine("consumer", &[TransportKind::Cma, TransportKind::Tcp]);
    let target = cache(&consumer, Memory::Private);
    let first = listening("producer", &common::place_of_its_own());
    let address = first.address().unwrap().to_owned();
    let old = {
        let source = cache(&first, Memory::Private);
        let peer = consumer.connect(&address, Duration::from_secs(30)).unwrap();
        let old = source
            .export(table(&[1]), 4, b"", 1, LEASE)
            .unwrap()
            .reference()
            .clone();
        first.close();
        while peer.alive() {
            std::thread::sleep(Duration::from_millis(1));
        }
        old
    };
    let lost = target.pull(&old, table(&[1]), &PullOptions::default()).unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::PeerUnreachable);
    let second = listening("producer", &address);
    let source = cache(&second, Memory::Private);
    common::fill(&source, source.memory(), 3);
    consumer.connect(&address, Duration::from_secs(30)).unwrap();
    let stale = target.pull(&old, table(&[1]), &PullOptions::default()).unwrap_err();
    assert_eq!(stale.kind(), ErrorKind::ReferenceRestarted);
    let export = source.export(table(&[2]), 4, b"", 1, LEASE).unwrap();
    target
        .pull(export.reference(), table(&[1]), &PullOptions::default())
        .unwrap()
        .wait(WAIT)
        .unwrap();
    assert_eq!(common::read(&target, target.memory(), 0, 1), common::expected(3, 0, 2));
}

#[test]
fn many_shared_regions_are_handed_over_and_unmapped_when_the_peer_is_lost() {
    let producer = engine("producer", &[TransportKind::Shm]);
    let regions: Vec<_> = (0..200_u8)
        .map(|index| {
            let memory = HostRegion::allocate(4096, HugePages::Never).unwrap();
            memory.write_at(0, &[index; 4096]).unwrap();
            producer.register(memory, None, true).unwrap()
        })
        .collect();
    let consumer = engine("consumer", &[TransportKind::Shm]);
    let here = consumer.register(allocate(Memory::Private, 4096), None, true).unwrap();
    // By their inodes: other tests of this process map pools of their own.
    let inodes: Vec<u64> = regions
        .iter()
        .map(|region| {
            let fd = region.memory().shared().unwrap().fd.try_clone_to_owned().unwrap();
            std::fs::File::from(fd).metadata().unwrap().ino()
        })
        .collect();
    let mapped = || {
        let inode = |line: &str| line.split_whitespace().nth(4).and_then(|word| word.parse().ok());
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines()
            .filter_map(inode)
            .filter(|inode| inodes.contains(inode))
            .count()
    };
    let before = mapped();
    let peer = consumer
        .connect(producer.address().unwrap(), Duration::from_secs(30))
        .unwrap();
    for (index, region) in regions.iter().enumerate() {
        let dst = LocalSpan {
            region: here.id(),
            offset: 0,
            len: 4096,
        };
        let src = RemoteSpan {
            region: region.id(),
            offset: 0,
            len: 4096,
        };
        peer.read(&[dst], &[src], None, &RawOptions::default())
            .unwrap()
            .wait(WAIT)
            .unwrap();
        let mut bytes = [0; 4096];
        here.memory().read_at(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == index as u8), "region {index}");
    }
    assert_eq!(mapped(), before + 200);
    drop(regions);
    producer.close();
    while peer.alive() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let started = Instant::now();
    while mapped() > before {
        assert!(started.elapsed() < WAIT.unwrap(), "mappings outlive the peer");
        std::thread::sleep(Duration::from_millis(1));
    }
    let gone = peer.read(&[], &[], None, &RawOptions::default()).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::PeerLost);
}

#[test]
fn one_dead_peer_takes_only_its_own_transfers() {
    let consumer = engine("consumer", &[TransportKind::Tcp]);
    let target = Arc::new(cache(&consumer, Memory::Private));
    let good = engine("good", &[TransportKind::Tcp]);
    let bad = engine("bad", &[TransportKind::Tcp]);
    let mut exports = Vec::new();
    for producer in [&good, &bad] {
        let source = cache(producer, Memory::Private);
        consumer
            .connect(producer.address().unwrap(), Duration::from_secs(30))
            .unwrap();
        exports.push(
            (0..4)
                .map(|block| source.export(table(&[block]), 4, b"", 1, LEASE).unwrap())
                .collect::<Vec<_>>(),
        );
    }
    bad.close();
    for (index, export) in exports[0].iter().enumerate() {
        let into = table(&[index as u32]);
        target
            .pull(export.reference(), into, &PullOptions::default())
            .unwrap()
            .wait(WAIT)
            .unwrap();
    }
    for export in &exports[1] {
        let ended = target
            .pull(export.reference(), table(&[20]), &PullOptions::default())
            .and_then(|t| t.wait(WAIT));
        let kind = ended.unwrap_err().kind();
        assert!(
            matches!(
                kind,
                ErrorKind::PeerLost | ErrorKind::PeerUnreachable | ErrorKind::Closed
            ),
            "{kind:?}"
        );
    }
}

#[test]
fn after_close_every_call_says_closed_and_memory_is_given_back() {
    let alive = Arc::new(());
    let engine = engine("engine", common::OWN);
    let bytes = vec![0_u8; 4096].leak();
    let keeper = Box::new(Arc::clone(&alive));
    // SAFETY: leaked, so mapped, readable and writable for ever; the slice is not used again.
    let memory = unsafe { HostRegion::from_raw(bytes.as_mut_ptr() as u64, 4096, keeper) }.unwrap();
    let region = engine.register(memory, None, true).unwrap();
    assert_eq!(Arc::strong_count(&alive), 2);
    let cache = cache(&engine, Memory::Private);
    engine.close();
    engine.close();
    drop(region);
    assert_eq!(Arc::strong_count(&alive), 1, "the lender's memory is still held");
    let error = engine.connect("127.0.0.1:1", Duration::from_secs(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    let error = cache.export(table(&[1]), 4, b"", 1, LEASE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert_eq!(
        engine
            .register(allocate(Memory::Private, 64), None, true)
            .unwrap_err()
            .kind(),
        ErrorKind::Closed
    );
}
