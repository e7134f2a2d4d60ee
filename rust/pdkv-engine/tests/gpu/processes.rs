//! Two processes on one GPU: memory is lent over the local socket, mapped, and let go.

use std::ffi::CString;
use std::time::Duration;

use pdkv_core::ErrorKind;
use pdkv_core::reference::Reference;
use pdkv_engine::{KvCache, PullOptions, Region, TransferState, TransportKind};

use crate::common::child::{Child, is_child, obey};
use crate::common::standin::{Hold, count, fail, is_here, is_here_with, replace};
use crate::common::{self, LAYERS, LEASE, Memory, WAIT, Way, cache, engine, table};
use crate::lanes::{PUTS, pattern};
use crate::{eventually, looks};

pub(crate) const CHILD: &str = "processes::child";

/// A process with one engine and one cache, which does what its parent says; nothing where there is no parent.
#[test]
fn child() {
    if !is_child() {
        return;
    }
    let kind = match std::env::var("PDKV_TEST_MEMORY").as_deref() {
        Ok("malloc") => Memory::Malloc,
        Ok("segments") => Memory::Segments,
        Ok("shared") => Memory::Shared,
        Ok("private") => Memory::Private,
        _ => Memory::Device,
    };
    let ways = [TransportKind::Cuda, TransportKind::Tcp];
    let has = |setting| std::env::var_os(setting).is_some();
    let engine = if has("PDKV_TEST_LANE") {
        Way::from(PUTS).engine("child")
    } else {
        engine("child", if has("PDKV_TEST_STAGES") { &ways } else { &ways[..1] })
    };
    let ours = cache(&engine, kind);
    common::fill(&ours, ours.memory(), 1);
    let mut transfers = Vec::new();
    let mut region: Option<Region> = None;
    let mut held = None;
    obey(|words| match words {
        ["address"] => engine.address().unwrap().to_owned(),
        ["export", blocks @ ..] => {
            let blocks = numbers(blocks);
            let export = ours
                .export(table(&blocks), 4 * blocks.len() as u64, b"", 1, LEASE)
                .unwrap();
            export.reference().to_json()
        }
        ["offer", blocks @ ..] => {
            let blocks = numbers(blocks);
            let offer = ours.offer(table(&blocks), 4 * blocks.len() as u64, b"", LEASE).unwrap();
            offer.reference().to_json()
        }
        ["check", seed, block, as_block] => {
            let [seed, block, as_block] = [seed, block, as_block].map(|word| word.parse::<u32>().unwrap());
            let right = (0..LAYERS).all(|layer| {
                common::read(&ours, ours.memory(), layer, block) == common::expected(seed.into(), layer, as_block)
            });
            right.to_string()
        }
        ["push", address, reference, blocks @ ..] => {
            engine.connect(address, Duration::from_secs(30)).unwrap();
            let offer = Reference::from_json(reference).unwrap();
            let pushed = ours.push(&offer, table(&numbers(blocks)), &PullOptions::default());
            transfers.push(pushed.unwrap());
            "pushing".to_owned()
        }
        ["refused", address, reference, blocks @ ..] => {
            engine.connect(address, Duration::from_secs(30)).unwrap();
            let offer = Reference::from_json(reference).unwrap();
            let pushed = ours.push(&offer, table(&numbers(blocks)), &PullOptions::default());
            pushed.unwrap_err().message().to_owned()
        }
        ["region", bytes] => {
            let memory = common::memory(kind, bytes.parse().unwrap());
            let made = region.insert(engine.register(memory, None, true).unwrap());
            made.id().0.to_string()
        }
        ["stamp", seed] => {
            let bytes = pattern(seed.parse().unwrap());
            region.as_ref().unwrap().memory().write_at(0, &bytes).unwrap();
            "stamped".to_owned()
        }
        ["stamped", seed, len] => {
            let mut got = vec![0; len.parse().unwrap()];
            region.as_ref().unwrap().memory().read_at(0, &mut got).unwrap();
            pattern(seed.parse().unwrap()).starts_with(&got).to_string()
        }
        ["replace"] => {
            replace(region.as_ref().unwrap().memory().address());
            "replaced".to_owned()
        }
        ["notifications"] => engine.notifications().len().to_string(),
        ["deregister"] => {
            ours.deregister().unwrap();
            "gone".to_owned()
        }
        ["hold"] => {
            held = Some(Hold::kernels());
            "held".to_owned()
        }
        ["hold", "everything"] => {
            held = Some(Hold::everything());
            "held".to_owned()
        }
        ["name"] => {
            let shared = ours.memory()[0].device().unwrap().share().unwrap();
            let pdkv_device::cuda::Handle::Ipc(name) = &shared[0].handle else {
                panic!("memory of cudaMalloc has a name of CUDA IPC")
            };
            let (offset, allocation) = (shared[0].offset, shared[0].allocation_len);
            format!("{offset} {allocation} {}", pdkv_core::hex::encode(name))
        }
        ["looks"] => looks().to_string(),
        ["launches"] => count("launches").to_string(),
        ["calls", call] => count(&format!("calls {call}")).to_string(),
        ["fail", call, status] => {
            fail(&CString::new(*call).unwrap(), 1, status.parse().unwrap());
            "once".to_owned()
        }
        other => panic!("{other:?}, {}", held.is_some()),
    });
}

fn numbers(words: &[&str]) -> Vec<u32> {
    words.iter().map(|word| word.parse().unwrap()).collect()
}

pub(crate) fn reference(text: &str) -> Reference {
    Reference::from_json(text).unwrap()
}

fn holds(cache: &KvCache, seed: u64, pairs: &[(u32, u32)]) {
    for layer in 0..LAYERS {
        for &(block, from) in pairs {
            let got = common::read(cache, cache.memory(), layer, block);
            assert_eq!(got, common::expected(seed, layer, from), "layer {layer} block {block}");
        }
    }
}

#[test]
fn pages_of_a_neighbour_are_read_and_written_in_place() {
    if !is_here("processes::pages_of_a_neighbour_are_read_and_written_in_place") {
        return;
    }
    for (theirs, ours) in [
        ("device", Memory::Device),
        ("malloc", Memory::Device),
        ("malloc", Memory::Private),
        ("segments", Memory::Malloc),
        ("malloc", Memory::Other),
        ("segments", Memory::Other),
        ("shared", Memory::Device),
    ] {
        let mut child = Child::start(CHILD, &[("PDKV_TEST_MEMORY", theirs)]);
        let engine = engine("parent", &[TransportKind::Cuda]);
        let cache = cache(&engine, ours);
        common::fill(&cache, cache.memory(), 2);
        let peer = engine.connect(&child.ask("address"), Duration::from_secs(30)).unwrap();
        let export = reference(&child.ask("export 5 6 7 60"));
        let pulled = cache
            .pull(&export, table(&[9, 10, 1, 63]), &PullOptions::default())
            .unwrap();
        pulled.wait(WAIT).unwrap();
        assert_eq!(pulled.path().transport, TransportKind::Cuda, "{theirs}");
        assert_eq!(pulled.stats().staged_bytes, 0);
        holds(&cache, 1, &[(9, 5), (10, 6), (1, 7), (63, 60)]);
        let offer = reference(&child.ask("offer 20 21"));
        let pushed = cache.push(&offer, table(&[30, 31]), &PullOptions::default()).unwrap();
        pushed.wait(WAIT).unwrap();
        assert_eq!(child.ask("check 2 20 30"), "true", "{theirs}");
        assert_eq!(child.ask("check 2 21 31"), "true", "{theirs}");
        assert_eq!(child.ask("check 1 22 22"), "true", "{theirs}");
        peer.close();
        // Memory of our own is laid like that of others, in one piece.
        let own = i64::from(matches!(ours, Memory::Device | Memory::Other));
        eventually("what was mapped is let go", || {
            count("mappings") == 0 && count("laid") == own
        });
    }
}

#[test]
fn a_gpu_that_does_not_reach_the_neighbours_leaves_it_to_the_stage() {
    let settings = [("PDKV_STANDIN_PEERS", "0")];
    if !is_here_with(
        "processes::a_gpu_that_does_not_reach_the_neighbours_leaves_it_to_the_stage",
        &settings,
    ) {
        return;
    }
    for theirs in ["malloc", "segments"] {
        let mut child = Child::start(CHILD, &[("PDKV_TEST_MEMORY", theirs), ("PDKV_TEST_STAGES", "1")]);
        let engine = engine("parent", &[TransportKind::Cuda, TransportKind::Tcp]);
        let cache = cache(&engine, Memory::Other);
        engine.connect(&child.ask("address"), Duration::from_secs(30)).unwrap();
        let mut pull = || {
            let offered = reference(&child.ask("export 5 6"));
            cache.pull(&offered, table(&[1, 2]), &PullOptions::default()).unwrap()
        };
        // Whether it is tried before the first transfer is a race; the one after it knows.
        let _ = pull().wait(WAIT);
        let known = pull();
        known.wait(WAIT).unwrap();
        assert_eq!(known.path().transport, TransportKind::Tcp, "{theirs}");
        holds(&cache, 1, &[(1, 5), (2, 6)]);
    }
}

#[test]
fn private_memory_of_another_process_is_out_of_reach_and_named() {
    if !is_here("processes::private_memory_of_another_process_is_out_of_reach_and_named") {
        return;
    }
    let mut child = Child::start(CHILD, &[("PDKV_TEST_MEMORY", "private")]);
    let engine = engine("parent", &[TransportKind::Cuda]);
    let cache = cache(&engine, Memory::Device);
    engine.connect(&child.ask("address"), Duration::from_secs(30)).unwrap();
    let export = reference(&child.ask("export 5"));
    let error = cache.pull(&export, table(&[1]), &PullOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(
        error.message().contains("is private memory, which no GPU here reaches"),
        "{error}"
    );
}

#[test]
fn a_neighbour_that_is_killed_under_way_ends_the_transfer_and_its_mapping_goes_last() {
    if !is_here("processes::a_neighbour_that_is_killed_under_way_ends_the_transfer_and_its_mapping_goes_last") {
        return;
    }
    let mut child = Child::start(CHILD, &[("PDKV_TEST_MEMORY", "malloc")]);
    let engine = engine("parent", &[TransportKind::Cuda]);
    let cache = cache(&engine, Memory::Device);
    engine.connect(&child.ask("address"), Duration::from_secs(30)).unwrap();
    let first = reference(&child.ask("export 5"));
    cache
        .pull(&first, table(&[1]), &PullOptions::default())
        .unwrap()
        .wait(WAIT)
        .unwrap();
    assert!(count("mappings") > 0);
    let export = reference(&child.ask("export 6 7"));
    let held = Hold::kernels();
    let before = count("launches");
    let transfer = cache.pull(&export, table(&[2, 3]), &PullOptions::default()).unwrap();
    eventually("the launch", || count("launches") > before);
    child.kill();
    let error = transfer.wait(WAIT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert!(
        !transfer.wait_quiesced(Some(Duration::from_millis(20))),
        "the GPU writes on"
    );
    assert!(count("mappings") > 0, "unmapped under the GPU");
    drop(held);
    assert!(transfer.wait_quiesced(WAIT));
    assert_eq!(transfer.destination(), "invalid");
    eventually("what was mapped is let go", || count("mappings") == 0);
}

#[test]
fn blocks_that_a_killed_neighbour_was_writing_are_reusable_once_it_is_gone() {
    if !is_here("processes::blocks_that_a_killed_neighbour_was_writing_are_reusable_once_it_is_gone") {
        return;
    }
    let mut child = Child::start(CHILD, &[]);
    let engine = engine("parent", &[TransportKind::Cuda]);
    let cache = cache(&engine, Memory::Device);
    common::fill(&cache, cache.memory(), 2);
    let offer = cache.offer(table(&[4, 5]), 8, b"", LEASE).unwrap();
    assert_eq!(child.ask("hold"), "held");
    let push = format!("push {} {} 8 9", engine.address().unwrap(), offer.reference().to_json());
    // Something was measured before.
    let before = child.ask("launches");
    assert_eq!(child.ask(&push), "pushing");
    while child.ask("launches") == before {
        std::thread::sleep(Duration::from_millis(1));
    }
    offer.release().unwrap();
    assert!(
        !offer.wait_quiesced(Some(Duration::from_millis(20))),
        "its writer has not said that it is out"
    );
    child.kill();
    assert!(offer.wait_quiesced(WAIT));
    holds(&cache, 2, &[(4, 4), (5, 5)]);
}

#[test]
fn an_engine_that_closes_lets_go_of_what_was_lent_while_its_owner_lives() {
    if !is_here("processes::an_engine_that_closes_lets_go_of_what_was_lent_while_its_owner_lives") {
        return;
    }
    let mut child = Child::start(CHILD, &[("PDKV_TEST_MEMORY", "malloc")]);
    let engine = engine("parent", &[TransportKind::Cuda]);
    let ours = cache(&engine, Memory::Device);
    let peer = engine.connect(&child.ask("address"), Duration::from_secs(30)).unwrap();
    let export = reference(&child.ask("export 5"));
    let transfer = ours.pull(&export, table(&[1]), &PullOptions::default()).unwrap();
    transfer.wait(WAIT).unwrap();
    assert_eq!(transfer.state(), TransferState::Done);
    assert!(count("mappings") > 0);
    engine.close();
    assert!(!peer.alive());
    eventually("what was mapped is let go", || count("mappings") == 0);
}

#[test]
fn a_cache_that_its_owner_deregisters_is_unmapped_once_no_transfer_uses_it() {
    if !is_here("processes::a_cache_that_its_owner_deregisters_is_unmapped_once_no_transfer_uses_it") {
        return;
    }
    for theirs in ["malloc", "device", "segments"] {
        let mut child = Child::start(CHILD, &[("PDKV_TEST_MEMORY", theirs)]);
        let engine = engine("parent", &[TransportKind::Cuda]);
        let ours = cache(&engine, Memory::Malloc);
        let peer = engine.connect(&child.ask("address"), Duration::from_secs(30)).unwrap();
        let [first, second] = ["export 5", "export 6 7"].map(|asked| reference(&child.ask(asked)));
        let mapped = || count("mappings") + count("laid");
        ours.pull(&first, table(&[1]), &PullOptions::default())
            .unwrap()
            .wait(WAIT)
            .unwrap();
        assert!(mapped() > 0);
        let held = Hold::kernels();
        let before = count("launches");
        let transfer = ours.pull(&second, table(&[2, 3]), &PullOptions::default()).unwrap();
        eventually("the launch", || count("launches") > before);
        assert_eq!(child.ask("deregister"), "gone");
        eventually("the cache is withdrawn", || {
            let again = ours.pull(&first, table(&[10]), &PullOptions::default());
            again.is_err_and(|error| error.kind() == ErrorKind::ReferenceUnknown)
        });
        assert!(
            !transfer.wait_quiesced(Some(Duration::from_millis(20))),
            "the GPU reads on"
        );
        assert!(mapped() > 0, "unmapped under the GPU");
        drop(held);
        assert!(transfer.wait_quiesced(WAIT));
        assert!(transfer.wait(WAIT).is_err(), "its owner took it back");
        eventually("what was mapped is let go", || mapped() == 0);
        assert!(peer.alive());
    }
}

#[test]
fn a_gpu_on_which_only_a_peer_has_memory_is_opened_beside_the_call() {
    if !is_here("processes::a_gpu_on_which_only_a_peer_has_memory_is_opened_beside_the_call") {
        return;
    }
    let mut child = Child::start(CHILD, &[("PDKV_TEST_MEMORY", "malloc")]);
    let engine = engine("parent", &[TransportKind::Cuda]);
    let ours = cache(&engine, Memory::Private);
    engine.connect(&child.ask("address"), Duration::from_secs(30)).unwrap();
    let exports = ["export 5", "export 6", "export 7"].map(|asked| reference(&child.ask(asked)));
    let pull = |number: usize| ours.pull(&exports[number], table(&[number as u32]), &PullOptions::default());
    assert_eq!(count("calls cuInit"), 0);
    fail(c"cuDevicePrimaryCtxRetain", 1, 2);
    // The call knows nothing of it: it has opened nothing.
    let transfer = pull(0).unwrap();
    let error = transfer.wait(WAIT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    assert!(
        error.message().contains("`cuDevicePrimaryCtxRetain` returned `2`"),
        "{error}"
    );
    assert!(transfer.wait_quiesced(WAIT));
    // Others do not fail in turn, and find it open once there is room.
    let refused = pull(1).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert!(refused.message().contains("GPU `0` can't be used"), "{refused}");
    eventually("it is tried again", || {
        pull(1).is_ok_and(|transfer| transfer.wait(WAIT).is_ok())
    });
    let names = || count("calls cuDeviceGetUuid_v2");
    let before = names();
    pull(2).unwrap().wait(WAIT).unwrap();
    assert_eq!(names(), before);
    holds(&ours, 1, &[(1, 6), (2, 7)]);
}

#[test]
fn a_driver_is_started_by_nobody_who_calls_and_only_for_transfers() {
    if !is_here("processes::a_driver_is_started_by_nobody_who_calls_and_only_for_transfers") {
        return;
    }
    let mut child = Child::start(CHILD, &[("PDKV_TEST_MEMORY", "malloc"), ("PDKV_TEST_STAGES", "1")]);
    let engine = engine("parent", &[TransportKind::Cuda, TransportKind::Tcp]);
    let ours = cache(&engine, Memory::Private);
    let peer = engine.connect(&child.ask("address"), Duration::from_secs(30)).unwrap();
    assert!(peer.links().iter().all(|link| link.usable), "{:?}", peer.links());
    let mut pull = |require: Option<TransportKind>| {
        let export = reference(&child.ask("export 5"));
        let options = PullOptions {
            require: require.map(Into::into),
            ..PullOptions::default()
        };
        let transfer = ours.pull(&export, table(&[1]), &options).unwrap();
        transfer.wait(WAIT).unwrap();
        transfer.path().clone()
    };
    assert_eq!(pull(Some(TransportKind::Tcp)).transport, TransportKind::Tcp);
    assert_eq!(count("calls cuInit"), 0, "nobody wants it");
    // There is another way while it is started.
    let first = pull(None);
    assert_eq!(first.transport, TransportKind::Tcp);
    assert!(
        first.reasons.iter().any(|reason| reason.contains("is being found out")),
        "{first:?}"
    );
    eventually("it is started", || count("calls cuInit by pdkv-parent") == 1);
    eventually("the GPU copies", || {
        let path = pull(None);
        path.transport == TransportKind::Cuda
    });
    assert_eq!(count("calls cuInit"), 1);
    holds(&ours, 1, &[(1, 5)]);
}

#[test]
fn a_way_that_is_required_waits_for_the_driver_beside_the_call() {
    if !is_here("processes::a_way_that_is_required_waits_for_the_driver_beside_the_call") {
        return;
    }
    let mut child = Child::start(CHILD, &[("PDKV_TEST_MEMORY", "malloc"), ("PDKV_TEST_STAGES", "1")]);
    let engine = engine("parent", &[TransportKind::Cuda, TransportKind::Tcp]);
    let ours = cache(&engine, Memory::Private);
    engine.connect(&child.ask("address"), Duration::from_secs(30)).unwrap();
    let options = PullOptions {
        require: Some(TransportKind::Cuda.into()),
        ..PullOptions::default()
    };
    let export = reference(&child.ask("export 5"));
    let transfer = ours.pull(&export, table(&[1]), &options).unwrap();
    transfer.wait(WAIT).unwrap();
    assert_eq!(transfer.path().transport, TransportKind::Cuda);
    assert_eq!((count("calls cuInit"), count("calls cuInit by pdkv-parent")), (1, 1));
    holds(&ours, 1, &[(1, 5)]);
}

#[test]
fn a_process_whose_driver_does_not_start_loses_no_transfer_by_it() {
    let settings = [("PDKV_STANDIN_INIT", "100")];
    if !is_here_with(
        "processes::a_process_whose_driver_does_not_start_loses_no_transfer_by_it",
        &settings,
    ) {
        return;
    }
    let settings = [
        ("PDKV_TEST_MEMORY", "malloc"),
        ("PDKV_TEST_STAGES", "1"),
        ("PDKV_STANDIN_INIT", "0"),
    ];
    let mut child = Child::start(CHILD, &settings);
    let engine = engine("parent", &[TransportKind::Cuda, TransportKind::Tcp]);
    let ours = cache(&engine, Memory::Private);
    engine.connect(&child.ask("address"), Duration::from_secs(30)).unwrap();
    let mut pull = || {
        let export = reference(&child.ask("export 5"));
        let transfer = ours.pull(&export, table(&[1]), &PullOptions::default()).unwrap();
        transfer.wait(WAIT).unwrap();
        assert_eq!(transfer.path().transport, TransportKind::Tcp);
        transfer.path().reasons.join("; ")
    };
    pull();
    let mut said = String::new();
    eventually("it is known", || {
        said = pull();
        !said.contains("is being found out")
    });
    assert!(said.contains("the CUDA driver finds no device"), "{said}");
    assert_eq!(count("calls cuInit"), count("calls cuInit by pdkv-parent"));
}
