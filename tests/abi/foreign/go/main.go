// Go through purego, without cgo: the case `causal` of tests/data.
//
//	go run . LIBRARY FOLDER
package main

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"
)

// The structures of flashattn.h as far as a forward call needs them by name: sizes and offsets are
// those of tests/abi/baseline.txt, which main checks.
type desc struct {
	structSize                   uint32
	device, deviceIndex          int32
	ops                          uint32
	dtype, dtypeKV, dtypeO       int32
	headsQ, headsKV, dimQK, dimV int32
	layout                       uint32
	pageSize                     int32
	mask                         uint32
	window                       [2]int32
	chunk, blockQ, blockKV, tree int32
	bias                         uint32
	dtypeBias                    int32
	features                     uint32
	determinism                  int32
	scale, softcap, dropout      float32
	descaleBlock, splits         int32
	maxima                       [3]int32
	multiprocessors, threads     int32
	totals                       [2]int64
	workspaceLimit               int64
}

type tensor struct {
	data    unsafe.Pointer
	strides [3]int64
}

// callError is the caller's own: goroutines move from thread to thread, and flashattn_last_error
// belongs to one.
type callError struct {
	structSize               uint32
	status, reason, reserved int32
	field                    [64]byte
	message                  [640]byte
}

type args struct {
	structSize               uint32
	batch, seqlenQ, seqlenKV int32
	totalQ, totalKV          int64
	q, k, v                  tensor
	inputs                   [42]uint64
	o                        tensor
	lse                      unsafe.Pointer
	gradients                [22]uint64
	parallel, parallelUser   unsafe.Pointer
	err                      *callError
}

var (
	planCreate    func(*desc, *unsafe.Pointer, *callError) int32
	planDestroy   func(unsafe.Pointer)
	argsInit      func(*args, uint32) int32
	workspaceSize func(unsafe.Pointer, uint32, *args, *int64) int32
	forward       func(unsafe.Pointer, *args, unsafe.Pointer, int64, unsafe.Pointer) int32
)

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func newError() *callError {
	return &callError{structSize: uint32(unsafe.Sizeof(callError{}))}
}

func text(bytes []byte) string {
	before, _, _ := strings.Cut(string(bytes), "\x00")
	return before
}

func checkStatus(status int32, e *callError) {
	if status != 0 {
		check(fmt.Errorf("status %d, %s: %s", status, text(e.field[:]), text(e.message[:])))
	}
}

// testCase is one paragraph of cases.txt, split into words.
type testCase struct {
	lines [][]string
	blob  []byte
}

func open(folder, name string) testCase {
	text, err := os.ReadFile(filepath.Join(folder, "cases.txt"))
	check(err)
	blob, err := os.ReadFile(filepath.Join(folder, "cases.bin"))
	check(err)
	_, after, _ := strings.Cut(string(text), "case "+name+"\n")
	paragraph, _, _ := strings.Cut(after, "\n\n")
	c := testCase{blob: blob}
	for _, line := range strings.Split(paragraph, "\n") {
		c.lines = append(c.lines, strings.Fields(line))
	}
	return c
}

// number is a field of a line "KIND FIELD=VALUE ..."; 0 when absent.
func (c testCase) number(kind, field string) int32 {
	for _, words := range c.lines {
		for _, word := range words[1:] {
			name, value, _ := strings.Cut(word, "=")
			if words[0] == kind && name == field {
				n, err := strconv.Atoi(value)
				check(err)
				return int32(n)
			}
		}
	}
	return 0
}

func (c testCase) find(name string) (bytes []byte, count int, words []string) {
	for _, words := range c.lines {
		if len(words) > 4 && words[1] == name && (words[0] == "array" || words[0] == "expect") {
			count := 1
			for _, dim := range strings.Split(words[3], ",") {
				n, err := strconv.Atoi(dim)
				check(err)
				count *= n
			}
			offset, err := strconv.Atoi(words[4])
			check(err)
			return c.blob[offset:], count, words
		}
	}
	check(fmt.Errorf("the case has no %s", name))
	return
}

func (c testCase) floats(name string) []float32 {
	bytes, count, _ := c.find(name)
	values := make([]float32, count)
	for n := range values {
		values[n] = math.Float32frombits(binary.LittleEndian.Uint32(bytes[4*n:]))
	}
	return values
}

// judge counts the numbers that are within the tolerance, and the others.
func (c testCase) judge(name string, got []float32) (passed, failed int) {
	bytes, count, words := c.find(name)
	tolerance, err := strconv.ParseFloat(words[5], 64)
	check(err)
	for n := 0; n < count; n++ {
		want := math.Float64frombits(binary.LittleEndian.Uint64(bytes[8*n:]))
		if math.Abs(float64(got[n])-want) <= tolerance {
			passed++
		} else {
			failed++
		}
	}
	return passed, failed
}

// refusals counts the goroutines that find the field of their own call in their own error.
func refusals(plan unsafe.Pointer, size uint32) (passed, failed int) {
	found := make(chan bool)
	fields := []string{"heads_q", "dim_qk", "q.data"}
	for n := 0; n < 60; n++ {
		go func(n int) {
			want, e := fields[n%3], newError()
			var made unsafe.Pointer
			var status int32
			switch want {
			case "heads_q":
				d := desc{structSize: size, dtype: 1, dimQK: 8}
				status = planCreate(&d, &made, e)
			case "dim_qk":
				d := desc{structSize: size, dtype: 1, headsQ: 1}
				status = planCreate(&d, &made, e)
			default:
				var pinned runtime.Pinner
				defer pinned.Unpin()
				pinned.Pin(e)
				var a args
				argsInit(&a, uint32(unsafe.Sizeof(a)))
				a.batch, a.seqlenQ, a.seqlenKV, a.err = 1, 1, 1, e
				status = forward(plan, &a, nil, 0, nil)
			}
			runtime.Gosched()
			found <- status == e.status && status != 0 && text(e.field[:]) == want &&
				strings.Contains(text(e.message[:]), want)
		}(n)
	}
	for n := 0; n < 60; n++ {
		if <-found {
			passed++
		} else {
			failed++
		}
	}
	return passed, failed
}

func main() {
	if unsafe.Sizeof(desc{}) != 160 || unsafe.Sizeof(args{}) != 704 ||
		unsafe.Sizeof(callError{}) != 720 {
		check(fmt.Errorf("the structures here are not those of the header"))
	}
	library, err := purego.Dlopen(os.Args[1], purego.RTLD_NOW|purego.RTLD_LOCAL)
	check(err)
	purego.RegisterLibFunc(&planCreate, library, "flashattn_plan_create")
	purego.RegisterLibFunc(&planDestroy, library, "flashattn_plan_destroy")
	purego.RegisterLibFunc(&argsInit, library, "flashattn_args_init")
	purego.RegisterLibFunc(&workspaceSize, library, "flashattn_workspace_size")
	purego.RegisterLibFunc(&forward, library, "flashattn_forward")

	c := open(os.Args[2], "causal")
	d := desc{structSize: uint32(unsafe.Sizeof(desc{})), dtype: c.number("desc", "dtype"),
		headsQ: c.number("desc", "heads_q"), dimQK: c.number("desc", "dim_qk"),
		mask: uint32(c.number("desc", "mask")), features: uint32(c.number("desc", "features"))}

	// The arguments hold pointers to Go's memory, which must not move during the call.
	var pinned runtime.Pinner
	defer pinned.Unpin()
	pin := func(values []float32) unsafe.Pointer {
		pinned.Pin(&values[0])
		return unsafe.Pointer(&values[0])
	}
	e := newError()
	pinned.Pin(e)
	var a args
	checkStatus(argsInit(&a, uint32(unsafe.Sizeof(a))), e)
	a.batch, a.seqlenQ = c.number("args", "batch"), c.number("args", "seqlen_q")
	a.seqlenKV, a.err = c.number("args", "seqlen_kv"), e
	_, sizeO, _ := c.find("o")
	_, sizeLSE, _ := c.find("lse")
	o, lse := make([]float32, sizeO), make([]float32, sizeLSE)
	a.q.data, a.k.data, a.v.data = pin(c.floats("q")), pin(c.floats("k")), pin(c.floats("v"))
	a.o.data, a.lse = pin(o), pin(lse)

	var plan unsafe.Pointer
	var bytes int64
	checkStatus(planCreate(&d, &plan, e), e)
	checkStatus(workspaceSize(plan, 1, &a, &bytes), e)
	workspace := make([]byte, bytes+1)
	checkStatus(forward(plan, &a, unsafe.Pointer(&workspace[0]), bytes, nil), e)

	passed, failed := refusals(plan, d.structSize)
	planDestroy(plan)
	for name, got := range map[string][]float32{"o": o, "lse": lse} {
		right, wrong := c.judge(name, got)
		passed, failed = passed+right, failed+wrong
	}
	fmt.Printf("%d passed, %d failed, 0 skipped\n", passed, failed)
	if failed > 0 {
		os.Exit(1)
	}
}
