//! What takes long on a GPU or at its driver, and whom it must not hold up.

use std::sync::mpsc;
use std::time::Duration;

use pdkv_core::ErrorKind;
use pdkv_device::cuda::{DeviceBuffer, Gpu, Stream};
use pdkv_engine::{LocalSpan, PullOptions, RawOptions, RemoteSpan, TransportKind, issue};

use crate::common::standin::{Hold, count, fail, is_here, reset};
use crate::common::{LEASE, Memory, Pair, WAIT, Way, cache, engine, memory, table};
use crate::{eventually, pair, pull, pull_under_way};

#[test]
fn memory_that_nobody_but_a_claim_held_is_let_go_where_nobody_waits_for_it() {
    if !is_here("held_up::memory_that_nobody_but_a_claim_held_is_let_go_where_nobody_waits_for_it") {
        return;
    }
    let producer = engine("producer", &[TransportKind::Cuda]);
    let beside = engine("beside", &[TransportKind::Inproc]);
    let consumer = engine("consumer", &[TransportKind::Cuda, TransportKind::Inproc]);
    let source = cache(&producer, Memory::Device);
    let target = cache(&consumer, Memory::Device);
    let [from, to] = [&beside, &consumer].map(|engine| cache(engine, Memory::Private));
    for owner in [&producer, &beside] {
        let address = owner.address().unwrap();
        consumer.connect(address, Duration::from_secs(30)).unwrap();
    }
    // Somebody else's work on the GPU, behind which memory is unmapped.
    let gpu = Gpu::open(0).unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    let word = DeviceBuffer::new(gpu.context(), 8).unwrap();
    let held = Hold::everything();
    word.fill(&stream, 1).unwrap();
    let waits = || count("calls cuCtxSynchronize");
    let before = waits();
    // A claim that waits for its export, which is never made.
    let ahead = issue(&source.issuer().unwrap(), 2, 8, b"", 1).unwrap();
    let options = PullOptions {
        timeout: Duration::from_millis(300),
        ..PullOptions::default()
    };
    let claims = target.pull(&ahead, table(&[1, 2]), &options).unwrap();
    target.deregister().unwrap();
    drop(target);
    // Either end's clock may be the first.
    let kind = claims.wait(WAIT).unwrap_err().kind();
    assert!(
        matches!(kind, ErrorKind::TransferTimeout | ErrorKind::ReferenceUnknown),
        "{kind:?}"
    );
    assert!(claims.wait_quiesced(WAIT));
    eventually("the last holder lets go", || waits() > before);
    let (told, tells) = mpsc::channel();
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            let export = from.export(table(&[5]), 4, b"", 1, LEASE).unwrap();
            let pulled = to.pull(export.reference(), table(&[1]), &PullOptions::default());
            told.send(pulled.and_then(|pulled| pulled.wait(WAIT))).unwrap();
        });
        let outcome = tells.recv_timeout(WAIT.unwrap());
        drop(held);
        outcome
    });
    outcome.expect("an engine that goes on").unwrap();
}

#[test]
fn a_transfer_ends_by_its_deadline_and_its_memory_waits_for_the_drivers_word() {
    if !is_here("held_up::a_transfer_ends_by_its_deadline_and_its_memory_waits_for_the_drivers_word") {
        return;
    }
    let pair = pair();
    let held = Hold::kernels();
    let options = PullOptions {
        // A busy machine has launched it by then.
        timeout: Duration::from_secs(10),
        ..PullOptions::default()
    };
    let transfer = pull_under_way(&pair, &options);
    let looks = [c"cuEventQuery", c"cuStreamQuery", c"cuStreamSynchronize"];
    for call in looks {
        fail(call, 0, 304);
    }
    assert_eq!(transfer.wait(WAIT).unwrap_err().kind(), ErrorKind::TransferTimeout);
    let asked = || count("calls cuEventQuery");
    let before = asked();
    eventually("the driver is asked again and again", || asked() > before + 100);
    assert!(!transfer.quiesced(), "the GPU writes later");
    reset();
    drop(held);
    assert!(transfer.wait_quiesced(WAIT));
    // Nothing is broken by it.
    pull(&pair, &PullOptions::default()).wait(WAIT).unwrap();
}

#[test]
fn a_request_looks_once_at_each_region_however_many_of_its_spans_lie_there() {
    if !is_here("held_up::a_request_looks_once_at_each_region_however_many_of_its_spans_lie_there") {
        return;
    }
    let pair = Pair::new(Way::staged(Memory::Malloc, Memory::Private));
    let register = |engine: &pdkv_engine::Engine, kind| engine.register(memory(kind, 1 << 16), None, true).unwrap();
    let near = register(&pair.consumer, Memory::Private);
    let far = [0, 1].map(|_| register(&pair.producer, Memory::Malloc));
    // Keys, values, keys, values.
    let read = |spans: u64| {
        let (here, there): (Vec<_>, Vec<_>) = (0..spans)
            .map(|number| {
                let (offset, len) = (number * 64, 64);
                let here = LocalSpan {
                    region: near.id(),
                    offset,
                    len,
                };
                let region = far[(number % 2) as usize].id();
                (here, RemoteSpan { region, offset, len })
            })
            .unzip();
        let before = count("calls cuPointerGetAttribute");
        let read = pair.peer.read(&here, &there, None, &RawOptions::default()).unwrap();
        read.wait(WAIT).unwrap();
        count("calls cuPointerGetAttribute") - before
    };
    let two = read(2);
    assert!(two >= 2, "{two} looks at two regions");
    assert_eq!(read(1000), two);
}

#[test]
fn stages_are_given_back_by_a_close_and_keep_nobody_who_lets_go_of_a_handle() {
    if !is_here("held_up::stages_are_given_back_by_a_close_and_keep_nobody_who_lets_go_of_a_handle") {
        return;
    }
    let pair = Pair::new(Way::staged(Memory::Device, Memory::Device));
    let before = count("pinned bytes");
    let transfer = pull(&pair, &PullOptions::default());
    transfer.wait(WAIT).unwrap();
    let staged = count("pinned bytes");
    assert!(staged > before, "{staged} after {before}");
    // Somebody else's work on the GPU, behind which pinned memory is freed.
    let gpu = Gpu::open(0).unwrap();
    let stream = Stream::new(gpu.context()).unwrap();
    let word = DeviceBuffer::new(gpu.context(), 8).unwrap();
    let held = Hold::everything();
    word.fill(&stream, 1).unwrap();
    let Pair {
        producer,
        consumer,
        source,
        target,
        peer,
    } = pair;
    let goes = std::thread::spawn(move || {
        assert!(consumer.close() && producer.close());
        drop((consumer, producer, peer));
        transfer
    });
    eventually("nobody is kept", || goes.is_finished());
    assert_eq!(count("pinned bytes"), staged, "the GPU is busy");
    drop(held);
    // Whoever keeps a transfer or a cache keeps no stage.
    let _kept = (goes.join().unwrap(), source, target);
    eventually("the stages are given back", || count("pinned bytes") <= before);
}
