//! One suite, every transport: what each must do, whoever moves the bytes. What `cuda` does here it does over a stand-in for
//! the driver; no GPU has run it. `ucx` with memory of GPUs goes by UCX's own module for CUDA over the same stand-in, and for want of an adapter
//! UCX emulates put and get. Here both ends are in one process; `gpu/processes.rs` and `gpu/far_lanes.rs` have memory of GPUs in two.

mod common;

use std::time::Duration;

use common::ucx::{self, Lane};
use common::{BLOCKS, LAYERS, LEASE, Memory, Pair, WAIT, Way, memory, standin, table, whole};
use pdkv_core::ErrorKind;
use pdkv_engine::{GpuMemory, LocalSpan, PullOptions, RawOptions, RemoteSpan, TransferState, TransportKind};

/// Makes one test for each transport from one body; `cuda` between memory of every kind, `ucx` in both manners and over whatever
/// it has here.
macro_rules! on_every_transport {
    ($( fn $name:ident($way:ident) $body:block )+) => { $(
        mod $name {
            use super::*;
            fn body($way: Way) $body
            #[test] fn inproc() { body(TransportKind::Inproc.into()); }
            #[test] fn shm() { body(TransportKind::Shm.into()); }
            #[test] fn cma() { body(TransportKind::Cma.into()); }
            #[test] fn tcp() { body(TransportKind::Tcp.into()); }
            #[test] fn tcp_of_gpus() { on_gpu(stringify!($name), "tcp_of_gpus", Way::staged(Memory::Device, Memory::Malloc), body); }
            #[test] fn tcp_to_gpu() { on_gpu(stringify!($name), "tcp_to_gpu", Way::staged(Memory::Private, Memory::Device), body); }
            #[test] fn tcp_from_gpu() { on_gpu(stringify!($name), "tcp_from_gpu", Way::staged(Memory::Device, Memory::Private), body); }
            #[test] fn cuda() { on_gpu(stringify!($name), "cuda", Way::cuda(Memory::Device, Memory::Device), body); }
            #[test] fn cuda_from_beside() { on_gpu(stringify!($name), "cuda_from_beside", Way::cuda(Memory::Other, Memory::Malloc), body); }
            #[test] fn cuda_from_host() { on_gpu(stringify!($name), "cuda_from_host", Way::cuda(Memory::Private, Memory::Device), body); }
            #[test] fn cuda_to_host() { on_gpu(stringify!($name), "cuda_to_host", Way::cuda(Memory::Device, Memory::Shared), body); }
            #[test] fn ucx_put_gpus() { on_gpu_lane(stringify!($name), "ucx_put_gpus", [Memory::Device, Memory::Malloc], body); }
            #[test] fn ucx_put_to_gpu() { on_gpu_lane(stringify!($name), "ucx_put_to_gpu", [Memory::Private, Memory::Segments], body); }
            #[test] fn ucx_put_from_gpu() { on_gpu_lane(stringify!($name), "ucx_put_from_gpu", [Memory::Other, Memory::Shared], body); }
            #[test] fn ucx_put_posix() { on_lane(Lane::puts("posix,cma"), body); }
            #[test] fn ucx_put_sysv() { on_lane(Lane::puts("sysv,cma"), body); }
            #[test] fn ucx_put_tcp() { on_lane(Lane::puts("tcp"), body); }
            #[test] fn ucx_put_all() { on_lane(Lane::puts("all"), body); }
            #[test] fn ucx_kernel_posix() { on_lane(Lane::kernel("posix,cma"), body); }
            #[test] fn ucx_messages_posix() { on_lane(Lane::messages("posix,cma"), body); }
            #[test] fn ucx_messages_sysv() { on_lane(Lane::messages("sysv,cma"), body); }
            #[test] fn ucx_messages_tcp() { on_lane(Lane::messages("tcp"), body); }
            #[test] fn ucx_messages_all() { on_lane(Lane::messages("all"), body); }
        }
    )+ };
}

fn on_gpu(test: &str, column: &str, way: Way, body: fn(Way)) {
    if standin::is_here(&format!("{test}::{column}")) {
        body(way);
    }
}

/// Put and get of memory of GPUs as UCX emulates them over sockets: no adapter is here that would carry them.
fn on_gpu_lane(test: &str, column: &str, [producer, consumer]: [Memory; 2], body: fn(Way)) {
    let way = Way::lane_of_gpus(Lane::puts("tcp,cuda_copy"), producer, consumer);
    on_lane_beside_gpu(test, column, way, body);
}

fn on_lane_beside_gpu(test: &str, column: &str, way: Way, body: fn(Way)) {
    if ucx::copy_for_gpus().is_some() && standin::is_here_for_ucx(&format!("{test}::{column}"), &[]) {
        body(way);
    }
}

fn on_lane(lane: Lane, body: fn(Way)) {
    if ucx::is_here() {
        body(lane.into());
    }
}

on_every_transport! {
    fn pull_scattered_blocks(way) {
        let pair = Pair::new(way);
        let theirs = [5, 6, 7, 60, 3, 4, 0];
        let ours = [9, 10, 40, 41, 42, 1, 63];
        let export = pair.source.export(table(&theirs), 28, b"digest", 1, LEASE).unwrap();
        let options = PullOptions { digest: Some(b"digest".to_vec()), ..PullOptions::default() };
        let transfer = pair.target.pull(export.reference(), table(&ours), &options).unwrap();
        transfer.wait(WAIT).unwrap();
        assert_eq!(transfer.state(), TransferState::Done);
        assert_eq!(transfer.path().transport, way.kind);
        assert_eq!(transfer.destination(), "valid");
        let stats = transfer.stats();
        assert_eq!(stats.bytes, 7 * LAYERS * common::BLOCK_BYTES);
        if way.is_direct() {
            assert_eq!(stats.staged_bytes, 0);
        }
        let moved: Vec<_> = ours.into_iter().zip(theirs).collect();
        pair.check(&moved, 0..LAYERS);
        assert!(transfer.wait_quiesced(WAIT));
        assert_eq!(export.wait(WAIT).unwrap().as_str(), "done");
    }

    fn pull_part_of_an_export(way) {
        let pair = Pair::new(way);
        let export = pair.source.export(table(&[8, 9, 10, 11]), 16, b"", 1, LEASE).unwrap();
        let options = PullOptions { first_block: 2, layers: Some((1, 1)), ..PullOptions::default() };
        pair.target.pull(export.reference(), table(&[0, 2]), &options).unwrap().wait(WAIT).unwrap();
        pair.check(&[(0, 10), (2, 11)], 1..2);
    }

    fn pull_nothing_still_ends_the_lease(way) {
        let pair = Pair::new(way);
        let export = pair.source.export(table(&[]), 0, b"", 1, LEASE).unwrap();
        pair.target.pull(export.reference(), table(&[]), &PullOptions::default()).unwrap().wait(WAIT).unwrap();
        assert_eq!(export.wait(WAIT).unwrap().as_str(), "done");
        pair.check(&[], 0..LAYERS);
    }

    fn push_into_an_offer(way) {
        // The consumer connects and pushes, so here the roles of the caches are swapped.
        let pair = Pair::new(way);
        common::fill(&pair.source, pair.source.memory(), 2);
        common::fill(&pair.target, pair.target.memory(), 1);
        let offer = pair.source.offer(table(&[7, 50, 51, 2]), 16, b"", LEASE).unwrap();
        let first = PullOptions { layers: Some((0, 2)), ..PullOptions::default() };
        pair.target.push(offer.reference(), table(&[1, 2, 3, 4]), &first).unwrap().wait(WAIT).unwrap();
        assert!(!offer.state().is_ended(), "a layer is missing");
        let rest = PullOptions { layers: Some((2, 1)), ..PullOptions::default() };
        pair.target.push(offer.reference(), table(&[1, 2, 3, 4]), &rest).unwrap().wait(WAIT).unwrap();
        assert_eq!(offer.wait(WAIT).unwrap().as_str(), "filled");
        assert!(offer.wait_quiesced(WAIT));
        for layer in 0..LAYERS {
            for (theirs, ours) in [(7, 1), (50, 2), (51, 3), (2, 4)] {
                let got = common::read(&pair.source, pair.source.memory(), layer, theirs);
                assert_eq!(got, common::expected(1, layer, ours), "layer {layer} block {theirs}");
            }
            assert_eq!(common::read(&pair.source, pair.source.memory(), layer, 8), common::expected(2, layer, 8));
        }
    }

    fn raw_write_then_notification_then_read_back(way) {
        let pair = Pair::new(way);
        let here = pair.consumer.register(memory(way.memory[1], 1 << 20), None, true).unwrap();
        let there = pair.producer.register(memory(way.memory[0], 1 << 20), None, true).unwrap();
        let data: Vec<u8> = (0..700_000_u32).map(|i| (i * 7 % 251) as u8).collect();
        here.memory().write_at(100, &data).unwrap();
        let (local, remote) = (here.id(), there.describe().region);
        let span = |offset, len| LocalSpan { region: local, offset, len };
        let far = |offset, len| RemoteSpan { region: remote, offset, len };
        let (to, from) = ([far(5000, 600_000), far(0, 3)], [span(100, 600_000), span(600_100, 3)]);
        let transfer = pair.peer.write(&to, &from, Some(b"r7"), &RawOptions::default()).unwrap();
        transfer.wait(WAIT).unwrap();
        let note = loop {
            if let Some(note) = pair.producer.notifications().pop() {
                break note;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert_eq!(note, ("consumer".to_owned(), b"r7".to_vec()));
        let mut got = vec![0; 600_000];
        there.memory().read_at(5000, &mut got).unwrap();
        assert!(got == data[..600_000], "the bytes are there when the notification is");
        let small = pair.peer.read(&[span(900_000, 4096)], &[far(5000, 4096)], None, &RawOptions::default()).unwrap();
        small.wait(WAIT).unwrap();
        let mut got = vec![0; 4096];
        here.memory().read_at(900_000, &mut got).unwrap();
        assert!(got == data[..4096]);
        let outside = pair.peer.read(&[span(0, 8)], &[far((1 << 20) - 4, 8)], None, &RawOptions::default());
        let error = outside.and_then(|transfer| transfer.wait(WAIT)).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Region | ErrorKind::Layout), "{error:?}");
    }

    fn raw_spans_by_the_thousand(way) {
        let pair = Pair::new(way);
        // What UCX emulates for a GPU takes a copy of the driver's for each span, and on the stand-in a change of pages. So thousands by a
        // lane, with memory of a GPU, are left to machines with adapters.
        let (count, piece) = (if way.is_emulated_for_gpus() { 200_u64 } else { 5000 }, 512);
        let here = pair.consumer.register(memory(way.memory[1], count * piece), None, true).unwrap();
        let there = pair.producer.register(memory(way.memory[0], count * piece), None, true).unwrap();
        let data: Vec<u8> = (0..count * piece).map(|i| (i / piece * 7 + i % 251) as u8).collect();
        here.memory().write_at(0, &data).unwrap();
        // Every other piece first: no two that follow one another are neighbours.
        let order: Vec<u64> = (0..count).step_by(2).chain((1..count).step_by(2)).collect();
        let near: Vec<_> = order
            .iter()
            .map(|at| LocalSpan { region: here.id(), offset: at * piece, len: piece })
            .collect();
        let far: Vec<_> = order
            .iter()
            .map(|at| RemoteSpan { region: there.id(), offset: at * piece, len: piece })
            .collect();
        pair.peer.write(&far, &near, None, &RawOptions::default()).unwrap().wait(WAIT).unwrap();
        let mut got = vec![0; data.len()];
        there.memory().read_at(0, &mut got).unwrap();
        assert!(got == data);
        here.memory().fill(0, count * piece, 0).unwrap();
        pair.peer.read(&near, &far, None, &RawOptions::default()).unwrap().wait(WAIT).unwrap();
        here.memory().read_at(0, &mut got).unwrap();
        assert!(got == data);
    }

    fn every_bad_reference_has_its_own_error(way) {
        let pair = Pair::new(way);
        let pull = |reference: &pdkv_core::reference::Reference, digest: &[u8]| {
            let options = PullOptions { digest: Some(digest.to_vec()), ..PullOptions::default() };
            let transfer = pair.target.pull(reference, table(&[1]), &options)?;
            let outcome = transfer.wait(WAIT);
            assert_eq!(transfer.destination(), if outcome.is_ok() { "valid" } else { "untouched" });
            outcome
        };
        let export = || pair.source.export(table(&[3]), 4, b"d", 1, LEASE).unwrap();
        let used = export();
        pull(used.reference(), b"d").unwrap();
        assert_eq!(pull(used.reference(), b"d").unwrap_err().kind(), ErrorKind::ReferenceUsed);
        let released = export();
        released.release().unwrap();
        assert_eq!(pull(released.reference(), b"d").unwrap_err().kind(), ErrorKind::ReferenceReleased);
        let expired = pair.source.export(table(&[3]), 4, b"d", 1, Duration::from_millis(1)).unwrap();
        expired.wait(WAIT).unwrap();
        assert_eq!(pull(expired.reference(), b"d").unwrap_err().kind(), ErrorKind::ReferenceExpired);
        let digest = export();
        assert_eq!(pull(digest.reference(), b"other").unwrap_err().kind(), ErrorKind::ReferenceDigest);
        let mut forged = digest.reference().clone();
        forged.num_tokens ^= 1;
        assert_eq!(pull(&forged, b"d").unwrap_err().kind(), ErrorKind::ReferenceForged);
        let mut restarted = digest.reference().clone();
        restarted.incarnation = pdkv_core::id::Incarnation::new([9; 16]);
        assert_eq!(pull(&restarted, b"d").unwrap_err().kind(), ErrorKind::ReferenceRestarted);
        pair.check(&[(1, 3)], 0..LAYERS);
    }

    fn bad_tables_are_refused_before_anything_moves(way) {
        let pair = Pair::new(way);
        let export = pair.source.export(table(&[3, 4]), 8, b"", 1, LEASE).unwrap();
        for ids in [&[1, 1][..], &[BLOCKS, 0], &[1, 2, 3]] {
            let refused = pair.target.pull(export.reference(), table(ids), &PullOptions::default());
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Layout, "{ids:?}");
        }
        assert_eq!(pair.source.export(table(&[BLOCKS]), 4, b"", 1, LEASE).unwrap_err().kind(), ErrorKind::Layout);
        let too_many = pair.source.export(table(&[1]), 5, b"", 1, LEASE);
        assert_eq!(too_many.unwrap_err().kind(), ErrorKind::Layout, "more tokens than the blocks hold");
        assert_eq!(pair.source.offer(table(&[1, 1]), 4, b"", LEASE).unwrap_err().kind(), ErrorKind::Layout);
        pair.check(&[], 0..LAYERS);
    }

    fn memory_of_gpus_goes_as_the_link_says(way) {
        let pair = Pair::new(way);
        let pull = |require_direct| {
            let export = pair.source.export(table(&[8]), 4, b"", 1, LEASE).unwrap();
            let options = PullOptions { require_direct, ..PullOptions::default() };
            pair.target.pull(export.reference(), table(&[2]), &options)?.wait(WAIT)
        };
        pull(false).unwrap();
        pair.check(&[(2, 8)], 0..LAYERS);
        let said = pair.link().gpu;
        assert_eq!(said, way.says_of_gpus());
        if way.is_of_gpus() {
            let refused = pull(true).map_err(|error| error.kind());
            let direct = said == GpuMemory::Direct;
            assert_eq!(refused, if direct { Ok(()) } else { Err(ErrorKind::Unsupported) }, "{said:?}");
        }
    }
}

/// Links between caches of the host, asked for memory of GPUs: what is said of it is what becomes of it.
mod links_of_the_host_say_what_they_do_with_memory_of_gpus {
    use super::*;

    const TEST: &str = "links_of_the_host_say_what_they_do_with_memory_of_gpus";
    const LEN: u64 = 100_000;

    fn moves(way: Way) {
        go(way, GpuMemory::Staged);
    }

    fn refuses(way: Way) {
        go(way, GpuMemory::Refused);
    }

    fn go(way: Way, wanted: GpuMemory) {
        let pair = Pair::new(way);
        let host = way.memory[0];
        for (ours, theirs) in [
            (Memory::Device, host),
            (host, Memory::Malloc),
            (Memory::Device, Memory::Malloc),
        ] {
            let here = pair.consumer.register(memory(ours, LEN), None, true).unwrap();
            let there = pair.producer.register(memory(theirs, LEN), None, true).unwrap();
            here.memory().fill(0, LEN, 3).unwrap();
            there.memory().fill(0, LEN, 7).unwrap();
            let (near, far) = whole(here.id(), there.id(), LEN);
            let transfer = ucx::settled(|| pair.peer.read(&near, &far, None, &RawOptions::default()));
            let outcome = transfer.and_then(|transfer| transfer.wait(WAIT));
            let (expected, byte) = match wanted {
                GpuMemory::Refused => (Err(ErrorKind::Unsupported), 3),
                _ => (Ok(()), 7),
            };
            assert_eq!(
                outcome.map_err(|error| error.kind()),
                expected,
                "{ours:?} from {theirs:?}"
            );
            let mut got = vec![0; LEN as usize];
            here.memory().read_at(0, &mut got).unwrap();
            assert!(got.iter().all(|&got| got == byte), "{ours:?} from {theirs:?}");
            assert_eq!(pair.link().gpu, wanted, "{ours:?} from {theirs:?}");
        }
    }

    #[test]
    fn inproc() {
        on_gpu(TEST, "inproc", TransportKind::Inproc.into(), refuses);
    }

    #[test]
    fn shm() {
        on_gpu(TEST, "shm", TransportKind::Shm.into(), refuses);
    }

    #[test]
    fn cma() {
        on_gpu(TEST, "cma", TransportKind::Cma.into(), refuses);
    }

    #[test]
    fn tcp() {
        on_gpu(TEST, "tcp", TransportKind::Tcp.into(), moves);
    }

    #[test]
    fn ucx_put() {
        on_lane_beside_gpu(TEST, "ucx_put", Lane::puts("tcp,cuda_copy").into(), moves);
    }

    #[test]
    fn ucx_put_without_cuda() {
        on_lane_beside_gpu(TEST, "ucx_put_without_cuda", Lane::puts("tcp").into(), refuses);
    }

    #[test]
    fn ucx_kernel() {
        on_lane_beside_gpu(TEST, "ucx_kernel", Lane::kernel("posix,cma,cuda_copy").into(), refuses);
    }

    #[test]
    fn ucx_messages() {
        on_lane_beside_gpu(TEST, "ucx_messages", Lane::messages("tcp,cuda_copy").into(), refuses);
    }
}
