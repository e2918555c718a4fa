//! Readers of published traces, on files written by hand in the published columns.

use std::path::{Path, PathBuf};

use policy::cluster::Class;
use tempfile::TempDir;

use super::*;

fn written(files: &[(&str, &str)]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let first = folder.path().join(files[0].0);
    (folder, first)
}

fn parsed(files: &[(&str, &str)], options: &Options) -> Result<Trace, String> {
    let (_folder, file) = written(files);
    read(&file, None, options).map_err(|error| error.to_string())
}

fn one(name: &str, text: &str) -> Result<Trace, String> {
    parsed(&[(name, text)], &Options::default())
}

/// Arrival, length and GPUs of each job.
fn shape(trace: &Trace) -> Vec<(f64, f64, u32)> {
    let jobs = trace.jobs.iter();
    jobs.map(|job| (job.arrival_s, job.work, job.gpus))
        .collect()
}

fn refused(name: &str, cases: &[(String, &[&str])]) {
    for (text, words) in cases {
        let error = one(name, text).expect_err(text);
        for word in *words {
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}

const PHILLY: &str = r#"[
 {"status": "Pass", "vc": "a", "jobid": "j0", "user": "u", "submitted_time": "2017-10-07 01:00:00",
  "attempts": [
   {"start_time": "2017-10-07 01:01:00", "end_time": "2017-10-07 01:02:00",
    "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}]},
   {"start_time": "2017-10-07 01:05:00", "end_time": "2017-10-07 02:05:00",
    "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0", "gpu1"]}]}]},
 {"status": "Failed", "vc": "b", "jobid": "j1", "user": "u",
  "submitted_time": "2017-10-07 00:59:30", "attempts": [
   {"start_time": "2017-10-07 00:59:30", "end_time": "2017-10-07 00:59:40",
    "detail": [{"ip": "m3", "gpus": ["gpu7"]}]}]},
 {"status": "Killed", "vc": "a", "jobid": "j2", "user": "u",
  "submitted_time": "2017-10-07 03:00:00", "attempts": []},
 {"status": "Killed", "vc": "a", "jobid": "j3", "user": "u",
  "submitted_time": "2017-10-07 03:00:00", "attempts": [
   {"start_time": null, "end_time": "None", "detail": [{"ip": "m1", "gpus": ["gpu0"]}]}]},
 {"status": "Killed", "vc": "a", "jobid": "j4", "user": "u",
  "submitted_time": "2017-10-07 03:00:00", "attempts": [
   {"start_time": "2017-10-07 03:00:05", "end_time": null,
    "detail": [{"ip": "m1", "gpus": ["gpu0"]}]}]},
 {"status": "Killed", "vc": "a", "jobid": "j5", "user": "u",
  "submitted_time": "2017-11-05 01:58:00", "attempts": [
   {"start_time": "2017-11-05 01:59:00", "end_time": "2017-11-05 01:09:00",
    "detail": [{"ip": "m1", "gpus": ["gpu0"]}]}]},
 {"status": "Killed", "vc": "a", "jobid": "j6", "user": "u",
  "submitted_time": "2017-10-07 03:00:00", "attempts": [
   {"start_time": "2017-10-07 03:00:05", "end_time": "2017-10-07 03:10:05", "detail": []}]}
]
"#;

#[test]
fn phillys_log_is_read_with_its_waits_and_what_it_lacks_is_counted() {
    let trace = one("cluster_job_log", PHILLY).unwrap();
    // By arrival, from the first; both attempts of j0 count, and its larger gang.
    assert_eq!(shape(&trace), [(0.0, 10.0, 1), (30.0, 3660.0, 4)]);
    assert_eq!(trace.users.all(), ["a", "b"]);
    assert_eq!(trace.skipped, 5);
    let left_out: Vec<_> = trace.left_out.into_iter().collect();
    assert_eq!(
        left_out,
        [
            ("never started", 1),
            (UNRECORDED, 1),
            ("still running", 1),
            (BACKWARDS, 1),
            (NO_GPU, 1),
        ]
    );
    let found = delays(&trace.recorded);
    assert_eq!((found.jobs, found.gpus, found.starts_again), (2, 4.0, 1));
    assert_eq!((found.wait_s.p90, found.between_s.p50), (60.0, 180.0));
    let part = Options {
        part: Some("b".into()),
        ..Options::default()
    };
    let trace = parsed(&[("log", PHILLY)], &part).unwrap();
    assert_eq!(shape(&trace), [(0.0, 10.0, 1)]);
}

#[test]
fn mistakes_in_phillys_log_are_reported_with_line_and_value() {
    let with = |from: &str, to: &str| {
        assert!(PHILLY.contains(from), "{from}");
        PHILLY.replacen(from, to, 1)
    };
    refused(
        "log",
        &[
            (
                with("01:00:00", "25:00:00"),
                &[":2:", "`2017-10-07 25:00:00`"],
            ),
            (
                with("2017-10-07 01:01:00", "yesterday"),
                &[":4:", "`yesterday`"],
            ),
            (
                with("2017-10-07 01:01:00", "9017-10-07 01:01:00"),
                &[":4:", "2200"],
            ),
            (
                with("2017-10-07 01:05:00\"", "2017-10-07 01:05:00+08:00\""),
                &[":6:", "+08:00`", "without a zone"],
            ),
            (
                with("\"2017-10-07 01:02:00\"", "-5"),
                &[":4:", "-5", "or null"],
            ),
            (with("\"Pass\"", "\"Passed\""), &[":2:", "Passed", "Killed"]),
            (with("\"vc\": \"a\", ", ""), &["vc"]),
            (
                with("\"vc\": \"a\"", "\"vc\": \"a\", \"vd\": 1"),
                &[":2:", "vd"],
            ),
            (
                with("\"2017-10-07 00:59:30\", \"att", "null, \"att"),
                &["`j1`", "submitted_time"],
            ),
            (
                with("\"gpu0\", \"gpu1\"]", "\"gpu0\", \"gpu0\"]"),
                &["`j0`", "twice"],
            ),
            (PHILLY[..PHILLY.len() - 3].to_owned(), &["EOF"]),
            (format!("{PHILLY} 5"), &["trailing"]),
            ("[5]".to_owned(), &[":1:", "5"]),
            ("[]".to_owned(), &["no job"]),
            ("[".repeat(100_000), &[":1:"]),
        ],
    );
}

const PAI_HEADER: &str =
    "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n";
const PAI: &str = "\
half,tensorflow,1.0,Terminated,110.0,210.0,600.0,29.3,50.0,T4
two,ps,1.0,Terminated,100.0,400.0,600.0,29.3,0.0,T4
two,worker,4.0,Failed,120.0,420.0,600.0,29.3,25.0,T4
cpu,ps,1.0,Terminated,100.0,400.0,600.0,29.3,,
waits,worker,1.0,Waiting,,,600.0,29.3,100.0,P100
back,worker,1.0,Failed,300.0,200.0,600.0,29.3,100.0,P100
big,worker,2.0,Terminated,300.0,1300.0,600.0,29.3,800.0,V100
";
const PAI_JOBS: &str = "\
half,i0,anna,Terminated,100.0,210.0
two,i1,ben,Terminated,120.0,420.0
";
const PAI_INSTANCES: &str = "\
two,worker,x,w0,i1,Terminated,120.0,220.0,m
two,worker,x,w1,i1,Terminated,120.0,420.0,m
half,tensorflow,x,w0,i0,Terminated,110.0,210.0,m
";

fn pai() -> Vec<(&'static str, &'static str)> {
    vec![
        ("pai_task_table.csv", PAI),
        ("pai_task_table.header", PAI_HEADER),
    ]
}

#[test]
fn pais_tasks_ask_for_parts_of_gpus_and_their_header_is_in_a_file_of_its_own() {
    let trace = parsed(&pai(), &Options::default()).unwrap();
    assert_eq!(
        shape(&trace),
        [(110.0, 100.0, 1), (120.0, 300.0, 4), (300.0, 1000.0, 16)]
    );
    assert_eq!(trace.jobs[0].part.map(|part| part.share), Some(0.5));
    assert_eq!(trace.jobs[1].part, None);
    let busy: Vec<f64> = trace.jobs.iter().map(|job| job.profile.busy).collect();
    assert_eq!(busy, [0.5, 0.25, 1.0]);
    assert_eq!(trace.skipped, 3);
    assert_eq!(
        (trace.users.all(), trace.variation.len()),
        (&["all".to_owned()][..], 0)
    );

    let mut files = pai();
    files.extend([
        ("pai_job_table.csv", PAI_JOBS),
        (
            "pai_job_table.header",
            "job_name,inst_id,user,status,start_time,end_time\n",
        ),
        ("pai_instance_table.csv", PAI_INSTANCES),
        (
            "pai_instance_table.header",
            "job_name,task_name,inst_name,worker_name,inst_id,status,start_time,end_time,machine\n",
        ),
    ]);
    let trace = parsed(&files, &Options::default()).unwrap();
    assert_eq!(trace.jobs[0].arrival_s, 100.0, "it waited 10 s");
    assert_eq!(delays(&trace.recorded).wait_s.p99, 10.0);
    assert!(
        trace
            .users
            .all()
            .starts_with(&["anna".into(), "ben".into()])
    );
    // 100 and 300 s: 100 about 200.
    assert_eq!(trace.variation, [0.5]);

    // A header as first line is as good.
    let text = format!("{PAI_HEADER}{PAI}");
    assert_eq!(one("tasks.csv", &text).unwrap().jobs.len(), 3);
    let both = [
        ("pai_task_table.csv", &*text),
        ("pai_task_table.header", PAI_HEADER),
    ];
    assert_eq!(parsed(&both, &Options::default()).unwrap().jobs.len(), 3);
    let type_of = Options {
        part: Some("V100".into()),
        ..Options::default()
    };
    assert_eq!(parsed(&pai(), &type_of).unwrap().jobs.len(), 1);
    // Without either there is nothing to go by.
    let error = one("pai_task_table.csv", PAI).unwrap_err();
    assert!(error.contains("pai_task_table.header"), "{error}");
}

#[test]
fn mistakes_in_pais_tables_are_reported_with_line_and_value() {
    let with = |from: &str, to: &str| {
        assert!(PAI.contains(from), "{from}");
        format!("{PAI_HEADER}{}", PAI.replacen(from, to, 1))
    };
    refused(
        "t.csv",
        &[
            (with("110.0", "-110.0"), &[":2:", "start_time is `-110.0`"]),
            (
                with("210.0", "1e12"),
                &[":2:", "end_time is `1e12`", "100 years"],
            ),
            (with("210.0", "soon"), &[":2:", "`soon`"]),
            (with("50.0", "-50"), &[":2:", "plan_gpu is `-50`"]),
            (
                with("50.0", "1e300"),
                &[":2:", "plan_gpu is `1e300`", "65536"],
            ),
            (with("50.0", "inf"), &[":2:", "`inf`"]),
            (
                with("4.0,Failed", "4.5,Failed"),
                &[":4:", "inst_num is `4.5`"],
            ),
            (with("4.0,Failed", ",Failed"), &[":4:", "inst_num is ``"]),
            (
                with("2.0,Terminated", "60000,Terminated"),
                &[":8:", "65536"],
            ),
            (with("half,", ","), &[":2:", "job_name is ``"]),
            (with(",T4\ntwo,ps", "\ntwo,ps"), &[":2:", "9 fields"]),
        ],
    );
}

#[test]
fn iterations_of_pais_workers_differ_by_worker_and_between_them() {
    let text = ",worker,gpu,time,batch_time_norm\n0,0,20,1,100\n1,1,20,1,300\n2,0,20,11,100\n\
                3,1,20,11,500\n";
    let (_folder, file) = written(&[("job.csv", text)]);
    let found = read_iterations(&file).unwrap();
    assert_eq!((found.len(), found[0].gpu_percent), (1, 20.0));
    // Worker 0 is always alike, worker 1 is 100 about 400.
    assert_eq!(
        (found[0].of_worker.p50, found[0].of_worker.p90),
        (0.0, 0.25)
    );
    // 100 about 200, and 200 about 300.
    let between = found[0].between_workers;
    assert!(
        (between.mean - (0.5 + 2.0 / 3.0) / 2.0).abs() < 1e-12,
        "{between:?}"
    );
    for (from, to, word) in [
        ("0,0,20", "0,0,0", "gpu is `0`"),
        (",100\n", ",-1\n", "`-1`"),
    ] {
        let (_folder, file) = written(&[("job.csv", &text.replacen(from, to, 1))]);
        let error = read_iterations(&file).unwrap_err().to_string();
        assert!(error.contains(":2:") && error.contains(word), "{error}");
    }
    let (_folder, file) = written(&[("job.csv", "worker,gpu,time,batch_time_norm\n")]);
    assert!(read_iterations(&file).is_err());
}

const SEREN: &str = "\
job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time
1,ua,1,8,128,Other,FAILED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-03-01 00:20:51+08:00,117,32,936.0
2,ub,0,0,8,Other,COMPLETED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-03-01 00:20:51+08:00,117,32,0
3,ua,8,64,960,Pretrain,CANCELLED,2023-02-28 16:20:00+00:00,,2023-02-28 16:30:00+00:00,0,600,0
4,ub,8,64,960,Pretrain,COMPLETED,2023-02-28 16:19:22+00:00,2023-02-28 16:19:22+00:00,2023-02-28 17:19:22+00:00,3600,0,0
";

#[test]
fn acmes_times_have_zones_and_jobs_that_never_started_are_counted() {
    let trace = one("trace_seren.csv", SEREN).unwrap();
    // The last is in another zone, and came a minute after the first.
    assert_eq!(shape(&trace), [(0.0, 117.0, 8), (60.0, 3600.0, 64)]);
    let left_out: Vec<_> = trace.left_out.into_iter().collect();
    assert_eq!(left_out, [(UNRECORDED, 1), (NO_GPU, 1)]);
    assert_eq!(delays(&trace.recorded).wait_s.p99, 32.0);
    assert_eq!(trace.kinds.all(), ["Other", "Pretrain"]);
    let with = |from: &str, to: &str| {
        assert!(SEREN.contains(from), "{from}");
        SEREN.replacen(from, to, 1)
    };
    refused(
        "t.csv",
        &[
            (
                with("16:19:22+00:00,2023", "16:19:22,2023"),
                &[":5:", "submit_time is `2023-02-28 16:19:22`", "with a zone"],
            ),
            (
                with("00:18:54+08:00", "00:18:54+80:00"),
                &[":2:", "+08:00 or Z"],
            ),
            (with("1,8,128", "1,-8,128"), &[":2:", "gpu_num is `-8`"]),
            (
                with("1,8,128", "1,8.5,128"),
                &[":2:", "gpu_num is `8.5`", "whole"],
            ),
            (with("1,8,128", "1,99999,128"), &[":2:", "65536"]),
            (
                with("2023-03-01 00:18:22", "1677600000"),
                &[":2:", "2017-10-09"],
            ),
        ],
    );
}

#[test]
fn what_a_reader_does_not_know_is_named_and_a_near_miss_is_refused() {
    let extra = SEREN
        .replace(",gpu_time\n", ",gpu_time,colour\n")
        .replace(",936.0\n", ",936.0,red\n")
        .replace(",0\n", ",0,red\n");
    assert_eq!(one("t.csv", &extra).unwrap().unused, ["colour"]);
    let plain = "arrival_s,duration_s,num_gpus,colour\n0,1,1,red\n";
    assert_eq!(one("t.csv", plain).unwrap().unused, ["colour"]);
    let error = one("t.csv", &plain.replace("colour", "dedline_s")).unwrap_err();
    assert!(
        error.contains(":1:") && error.contains("`dedline_s`"),
        "{error}"
    );
    assert!(error.contains("did you mean `deadline_s`"), "{error}");
    let known = "arrival_s,duration_s,num_gpus,deadline_s\n0,1,1,5\n";
    assert!(one("t.csv", known).unwrap().unused.is_empty());
}

#[test]
fn plain_traces_refuse_what_no_clock_says() {
    let with = |submit: &str, more: &str| {
        format!("submit,duration_s,num_gpus\n2017-10-09 07:01:55,1,1\n{submit},{more}\n")
    };
    refused(
        "t.csv",
        &[
            (
                with("5", "1,1"),
                &[":3:1:", "submit is `5`", "without a zone"],
            ),
            (
                with("2017-10-09 07:01:55Z", "1,1"),
                &[":3:1:", "without a zone"],
            ),
            (with("2017-10-32 07:01:55", "1,1"), &[":3:1:", "2017-10-32"]),
            (with("", "1,1"), &[":3:1:", "submit is ``"]),
            (
                with("2017-10-09 07:01:56", "1e300,1"),
                &[":3:", "duration_s is `1e300`"],
            ),
            (
                with("2017-10-09 07:01:56", "1,1e9"),
                &[":3:", "num_gpus is `1e9`"],
            ),
        ],
    );
    let far = "arrival_s,duration_s,num_gpus\n1e300,1,1\n".to_owned();
    refused(
        "t.csv",
        &[(far, &[":2:1:", "arrival_s is `1e300`", "100 years"])],
    );
}

#[test]
fn alibabas_instances_of_2025_are_there_before_and_after_the_trace() {
    const TEXT: &str = "\
instance_sn,role,app_name,cpu_request,cpu_limit,gpu_request,gpu_limit,rdma_request,rdma_limit,memory_request,memory_limit,disk_request,disk_limit,max_instance_per_node,creation_time,scheduled_time,deletion_time
i0,HN,a,12,12,1,1,25,25,120.0,120.0,680.0,800.0,8,,,
i1,CN,a,64,64,0,0,1,1,320.0,320.0,255.0,300.0,-1,1000.0,1000.0,9000.0
i2,HN,b,12,12,1,1,25,25,120.0,120.0,680.0,800.0,8,500.0,510.0,710.0
i3,HN,b,12,12,1,1,25,25,120.0,120.0,680.0,800.0,8,8000.0,8000.0,NaN
";
    let trace = one("t.csv", TEXT).unwrap();
    let expected = [(0.0, 9000.0, 1), (500.0, 200.0, 1), (8000.0, 1000.0, 1)];
    assert_eq!(shape(&trace), expected);
    assert_eq!((trace.skipped, trace.users.all().len()), (1, 2));
    assert_eq!(delays(&trace.recorded).wait_s.p99, 10.0);
    let with = |from: &str, to: &str| TEXT.replacen(from, to, 1);
    refused(
        "t.csv",
        &[
            (with("i0,HN", "i0,GN"), &[":2:", "role is `GN`"]),
            (
                with("500.0,510.0", "-500.0,510.0"),
                &[":4:", "creation_time is `-500.0`"],
            ),
            (with(",1,1,25", ",-1,1,25"), &[":2:", "gpu_request is `-1`"]),
        ],
    );
}

const SPOT: &str = "\
job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type
1,13,A10,20,1,1,0,2764,HP
2,57,A100,15,8,16,9589,41060,Spot
3,57,A10,15,0.5,1,9600,60,Spot
4,57,A10,15,0,1,9600,60,HP
";

#[test]
fn alibabas_spot_jobs_of_2026_are_opportunistic() {
    let trace = one("job_info_df.csv", SPOT).unwrap();
    let expected = [(0.0, 2764.0, 1), (9589.0, 41_060.0, 128), (9600.0, 60.0, 1)];
    assert_eq!(shape(&trace), expected);
    let class: Vec<Class> = trace.jobs.iter().map(|job| job.profile.class).collect();
    assert_eq!(
        class,
        [
            Class::Guaranteed,
            Class::Opportunistic,
            Class::Opportunistic
        ]
    );
    assert_eq!(trace.jobs[2].part.map(|part| part.share), Some(0.5));
    assert_eq!(
        (trace.users.all(), trace.skipped),
        (&["13".to_owned(), "57".into()][..], 1)
    );
    let with = |from: &str, to: &str| SPOT.replacen(from, to, 1);
    refused(
        "t.csv",
        &[
            (with(",HP", ",LP"), &[":2:", "job_type is `LP`", "Spot"]),
            (
                with("1,0,2764", "1,-1,2764"),
                &[":2:", "submit_time is `-1`"],
            ),
            (with("2764", ""), &[":2:", "duration is ``"]),
            (
                with("8,16", "8,60000"),
                &[":3:", "worker_num is `60000`", "65536"],
            ),
            (with("8,16", "8,0"), &[":3:", "worker_num is `0`"]),
        ],
    );
}

#[test]
fn alibabas_hours_of_2026_become_pods() {
    const TEXT: &str = "\
pod_id,gpu_spec_public,job_type_public,priority_class,gpu_request,used_gpu_hours,schedule_delay_sec,day,hour
p0,A,training,HP,2.0,1.0,30,1,23
p0,A,training,HP,2.0,2.0,,2,00
p1,A,dev,LP,0.5,0.25,,1,22
p2,B,dev,Other,0,0,,1,22
p3,B,dev,Other,1,,,1,22
";
    let trace = one("hourly.csv", TEXT).unwrap();
    // From the first hour that is seen; three of the hours of two GPUs are one and a half.
    assert_eq!(shape(&trace), [(0.0, 1800.0, 1), (3600.0, 5400.0, 2)]);
    assert_eq!(trace.jobs[0].profile.class, Class::Opportunistic);
    assert_eq!((trace.skipped, trace.recorded.len()), (2, 1));
    assert_eq!(delays(&trace.recorded).wait_s.p50, 30.0);
    let with = |from: &str, to: &str| TEXT.replacen(from, to, 1);
    refused(
        "t.csv",
        &[
            (with("1,23", "1,24"), &[":2:", "hour is `24`"]),
            (with("1,23", "-1,23"), &[":2:", "day is `-1`"]),
            (with("1,23", "1e9,23"), &[":2:", "day is `1e9`"]),
            (
                with("2.0,1.0", "2.0,900"),
                &[":2:", "used_gpu_hours is `900`"],
            ),
            (with("HP", "Top"), &[":2:", "priority_class is `Top`"]),
            (with("p0,", ","), &[":2:", "pod_id is ``"]),
            (
                "pod_id,gpu_request,duration_hours\na,1,2\n".to_owned(),
                &["asi_opensource_pod_hourly"],
            ),
        ],
    );
}

/// What is not there, is no file, or is no text.
#[test]
fn files_that_are_no_trace_are_refused() {
    assert!(read(Path::new("/"), None, &Options::default()).is_err());
    assert!(
        one("t.csv", "")
            .unwrap_err()
            .contains("no trace has the columns")
    );
    let (_folder, file) = written(&[("t.csv", "x")]);
    std::fs::write(&file, [0xff_u8, 0xfe, 0, 1, b'\n', 0x80]).unwrap();
    assert!(read(&file, None, &Options::default()).is_err());
    let header = [
        ("pai_task_table.csv", PAI),
        ("pai_task_table.header", "a,b\n"),
    ];
    let error = parsed(&header, &Options::default()).unwrap_err();
    assert!(error.contains("a, b"), "{error}");
}
